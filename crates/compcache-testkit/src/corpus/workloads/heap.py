# Grows a heap like those of Python programs until it is as many MB as the first argument says; prints "ready"; waits.
import ast, collections, glob, json, os, random, re, sys

wanted = int(sys.argv[1]) << 20
rng = random.Random(1)


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


kept = []
index = collections.defaultdict(list)
Row = collections.namedtuple("Row", "key text weight when tags")
library = os.path.dirname(os.__file__)
sources = sorted(glob.glob(library + "/*.py") + glob.glob(library + "/*/*.py"))
nth = 0
while resident() < wanted:
    path = sources[nth % len(sources)]
    nth += 1
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        continue
    words = re.findall(r"\w+", text)
    for place, word in enumerate(words):
        index[word].append((path, place))
    document = {
        "path": path,
        "lines": text.splitlines()[:200],
        "counts": dict(collections.Counter(words).most_common(300)),
        "weights": [round(rng.random() * 1000, 3) for _ in range(100)],
    }
    kept.append(json.loads(json.dumps(document)))
    kept.append([Row(i, w, rng.random(), 1.7e9 + i, {w[:2], w[-2:]}) for i, w in enumerate(words[:300])])
    if nth % 3 == 0:
        kept.append(tree)
    if nth % 5 == 0:
        kept.append(text)
        kept.append(json.dumps(document).encode())
    if nth % 7 == 0 and len(kept) > 20:
        # Programs free as well: holes are a part of a heap.
        del kept[rng.randrange(len(kept))]

print("ready", flush=True)
sys.stdin.read()
