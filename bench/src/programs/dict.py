# A dictionary of many small objects: built, walked, changed, looked up. Prints what it saw.
import hashlib
import random
import sys

entries = int(sys.argv[1])
rng = random.Random(7)
table = {}
for nth in range(entries):
    key = "%s-%d" % (("user", "order", "session", "item")[nth % 4], nth)
    table[key] = {"id": nth, "name": key.upper(), "score": rng.random(), "tags": [key[:2], nth % 97]}
for turn in range(3):
    total = 0.0
    for key, entry in table.items():
        total += entry["score"]
        entry["tags"].append(turn)
    print("turn", turn, len(table), "%.6f" % total)
keys = list(table)
digest = hashlib.sha256()
for _ in range(entries // 20):
    entry = table[keys[rng.randrange(entries)]]
    digest.update(repr(sorted(entry.items())).encode())
print(digest.hexdigest())
