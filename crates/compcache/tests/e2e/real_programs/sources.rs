//! What the programs run: each builds some 20 to 80 MiB of its runtime's own objects, works on them out of order, and
//! prints results that depend on all of them. The less at random a program goes over them, the more of them it may have.

use std::fmt::Write;

use compcache_testkit::seed::Seed;

/// Lines of three fields: a number, a word, text.
pub fn lines(count: usize) -> String {
    const WORDS: [&str; 12] =
        ["page", "memory", "cold", "fault", "evict", "swap", "codec", "arena", "span", "slot", "pool", "store"];
    let mut random = Seed::fixed(11).rng();
    let mut text = String::with_capacity(count * 48);
    for number in 0..count {
        let mut word = || WORDS[random.usize(..WORDS.len())];
        let (a, b, c, d) = (word(), word(), word(), word());
        let _ = writeln!(text, "{} {a}-{b}-{} {c} of {d}", (number * 7919) % count, random.u32(..100_000));
    }
    text
}

/// A history for `git fast-import`: one text that changes here and there.
pub fn history(commits: usize) -> String {
    let mut random = Seed::fixed(12).rng();
    let mut file: Vec<String> = lines(3000).lines().map(str::to_owned).collect();
    let mut stream = String::new();
    for commit in 0..commits {
        for _ in 0..20 {
            let at = random.usize(..file.len());
            file[at] = format!("changed by {commit}: {}", random.u64(..));
        }
        let text = file.join("\n");
        let message = format!("change {commit}");
        let _ = write!(stream, "commit refs/heads/main\nmark :{}\n", commit + 1);
        let _ = writeln!(stream, "committer A <a@example.org> {} +0000", 1_600_000_000 + commit);
        let _ = writeln!(stream, "data {}\n{message}", message.len());
        let _ = writeln!(stream, "M 100644 inline dir/file{}\ndata {}\n{text}", commit % 3, text.len());
    }
    stream
}

/// A library of many functions and generic types.
pub fn rust(functions: usize) -> String {
    let mut text = String::from("use std::collections::{BTreeMap, HashMap, VecDeque};\n");
    for i in 0..functions {
        let _ = writeln!(
            text,
            "pub struct S{i}<T> {{ a: Vec<T>, b: BTreeMap<u32, T> }}\n\
             impl<T: Clone + Ord + std::fmt::Debug> S{i}<T> {{\n\
               pub fn new() -> Self {{ Self {{ a: Vec::new(), b: BTreeMap::new() }} }}\n\
               pub fn put(&mut self, k: u32, v: T) -> Option<T> {{ self.a.push(v.clone()); self.a.sort(); self.b.insert(k ^ {i}, v) }}\n\
             }}\n\
             pub fn f{i}(x: u32) -> String {{\n\
               let mut s = S{i}::<String>::new(); let mut q = VecDeque::new(); let mut m = HashMap::<u32, u32>::new();\n\
               for k in 0..x {{ q.push_back(k * {i}); *m.entry(k % 7).or_default() += k; s.put(k, format!(\"{{k}} {{x}} {i}\")); }}\n\
               format!(\"{{:?}} {{:?}} {{}}\", s.b, q, m.len())\n\
             }}"
        );
    }
    text
}

pub const PYTHON: &str = r#"
import hashlib, json, random
random.seed(5)
things = {}
for i in range(12000):
    things["key%d" % i] = [i, str(i) * 80, {"a": i % 97, "b": [i, i + 1]}, float(i) / 3]
order = list(things)
random.shuffle(order)
total = 0
for name in order:
    thing = things[name]
    thing[2]["b"].append(len(name))
    total += thing[0] ^ thing[2]["a"]
for name in order[::3]:
    del things[name]
print(total, len(things))
text = json.dumps(things, sort_keys=True)
print(hashlib.sha256(text.encode()).hexdigest())
again = json.loads(text)
print(again == things, sum(thing[3] for thing in again.values()))
print("\n".join(sorted(again)[:2000]))
"#;

pub const PYTHON_POOL: &str = r#"
import hashlib, multiprocessing, threading, subprocess
table = [bytes(str(i), "ascii") * 20 for i in range(160000)]
def work(part):
    digest = hashlib.sha256()
    for i in range(part, len(table), 8):
        table[i] = table[i] + b"!"
        digest.update(table[i])
    return digest.hexdigest()
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print("\n".join(pool.map(work, range(8))))
    results = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: work(n)})) for n in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(sorted(results.items()))
    print(subprocess.run(["sh", "-c", "echo out of a child"], capture_output=True, text=True).stdout)
"#;

pub const NODE: &str = r#"
const crypto = require("crypto");
const rows = new Map();
for (let i = 0; i < 120000; i++) rows.set("row" + ((i * 7919) % 120000), { id: i, name: "n" + i, tags: ["a" + (i % 13), "b" + (i % 7)], at: i / 3 });
let sum = 0;
for (let pass = 0; pass < 3; pass++) for (let i = 0; i < 120000; i += 3) { const row = rows.get("row" + i); sum += row.id % 1000; row.tags.push("p" + pass); }
for (let i = 0; i < 120000; i += 2) rows.delete("row" + i);
const text = JSON.stringify([...rows.values()].sort((a, b) => a.id - b.id));
const buffer = Buffer.alloc(16 << 20);
for (let i = 0; i < buffer.length; i += 4) buffer.writeUInt32LE((i * 2654435761) >>> 16, i);
console.log(sum, rows.size, text.length, crypto.createHash("sha256").update(text).digest("hex"));
console.log(crypto.createHash("sha256").update(buffer).digest("hex"));
console.log(text.slice(0, 100000));
"#;

pub const JAVA: &str = r#"
import java.util.*;
import java.util.concurrent.*;
public class Work {
    record Row(int id, String name, int[] data) {}
    public static void main(String[] arguments) throws Exception {
        Map<String, Row> rows = new HashMap<>();
        for (int i = 0; i < 44000; i++) { int[] data = new int[24]; Arrays.fill(data, i % 17); data[i % 24] = i; rows.put("row" + i, new Row(i, "name" + i % 1000, data)); }
        ExecutorService pool = Executors.newFixedThreadPool(4);
        List<Future<Long>> parts = new ArrayList<>();
        for (int part = 0; part < 8; part++) {
            final int from = part;
            parts.add(pool.submit(() -> { long sum = 0; for (int pass = 0; pass < 2; pass++) for (int i = from; i < 44000; i += 8) { Row row = rows.get("row" + (int) ((i * 7919L) % 44000)); for (int value : row.data()) sum = sum * 31 + value; List<String> garbage = new ArrayList<>(); for (int j = 0; j < 4; j++) garbage.add(row.name() + j); sum += garbage.size(); } return sum; }));
        }
        for (Future<Long> part : parts) System.out.println(part.get());
        pool.shutdown();
        TreeMap<String, Integer> names = new TreeMap<>();
        for (Row row : rows.values()) names.merge(row.name(), row.id() % 7, Integer::sum);
        StringBuilder text = new StringBuilder();
        for (Map.Entry<String, Integer> name : names.entrySet()) text.append(name.getKey()).append('=').append(name.getValue()).append('\n');
        System.out.print(text);
    }
}
"#;

pub const PERL: &str = r#"
my (%seen, @list);
for my $i (1 .. 9000) { my $k = ($i * 7919) % 9001; $seen{"key$k"} = { n => $i, s => "text " x ($i % 700) }; push @list, $k if $i % 3 == 0; }
my $sum = 0;
for my $pass (1 .. 2) { for my $k (@list) { $sum += $seen{"key$k"}{n} % 101; $seen{"key$k"}{s} .= $pass; } }
my ($crc, @some) = (0);
for my $k (keys %seen) { $sum += length($seen{$k}{s}); push @some, $k if $seen{$k}{n} % 4 == 0; }
for my $k (sort @some) { $crc = ($crc * 33 + length($seen{$k}{s}) + $seen{$k}{n}) % 4294967291; print "$k $crc\n" if $crc % 50 == 0; }
print "$sum $crc ", scalar(keys %seen), "\n";
"#;

pub const AWK: &str = r#"
BEGIN {
    for (i = 0; i < 50; i++) pad = pad "padding "
    for (i = 0; i < 32000; i++) { k = (i * 7919) % 32003; text[k] = "value " i " of " k " " substr(pad, 1, i % 400); count[k % 1009]++ }
    for (pass = 0; pass < 2; pass++) for (i = 0; i < 32003; i += 2) if (i in text) { sum += length(text[i]); text[i] = text[i] pass }
    for (i = 0; i < 32003; i += 5) delete text[i]
    for (i = 0; i < 32003; i++) if (i in text) { n++; h = (h * 31 + length(text[i])) % 1000003; if (i % 100 == 1) print text[i] }
    for (i = 0; i < 1009; i++) print i, count[i]
    print sum, n, h
}
"#;

pub const SQL: &str = r"
PRAGMA cache_size = -200000;
PRAGMA temp_store = memory;
CREATE TABLE t (id INTEGER PRIMARY KEY, k INTEGER, name TEXT, extra TEXT);
WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < 130000)
INSERT INTO t SELECT i, (i * 7919) % 100003, 'name' || (i % 1000), printf('%0100d', i * 31) FROM c;
CREATE INDEX by_k ON t (k);
CREATE INDEX by_name ON t (name, k);
UPDATE t SET extra = extra || k WHERE id % 3 = 0;
DELETE FROM t WHERE id % 11 = 0;
SELECT name, count(*), sum(k), max(extra) FROM t GROUP BY name ORDER BY name;
SELECT a.id, b.id FROM t a JOIN t b ON a.k = b.k AND a.id < b.id ORDER BY a.id, b.id LIMIT 20000;
SELECT count(*), sum(length(extra)) FROM t;
PRAGMA integrity_check;
";

pub const CPP: &str = r#"
#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <regex>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>
template <int N> struct Made { std::map<std::string, std::vector<std::variant<int, std::string>>> m; int work(int x) { m[std::to_string(x)].push_back(N); std::sort(m.begin()->second.begin(), m.begin()->second.end()); return Made<N - 1>().work(x + N) + (int)m.size(); } };
template <> struct Made<0> { int work(int x) { return x; } };
int main() {
    std::unordered_map<std::string, std::function<int(int)>> table;
    table["made"] = [](int x) { return Made<16>().work(x); };
    std::regex pattern("([a-z]+)=([0-9]+)");
    std::smatch match;
    std::string text = "made=42";
    if (std::regex_match(text, match, pattern)) std::cout << table[match[1]](std::stoi(match[2])) << std::endl;
}
"#;

/// One of several units that are compiled side by side: a third of the compiler's memory for [`CPP`].
pub fn cpp_unit(number: usize) -> String {
    format!(
        r#"
#include <algorithm>
#include <map>
#include <string>
#include <vector>
template <int N> struct Made {{ std::map<std::string, std::vector<int>> m; int work(int x) {{ m[std::to_string(x)].push_back(N); std::sort(m.begin()->second.begin(), m.begin()->second.end()); return Made<N - 1>().work(x + N) + (int)m.size(); }} }};
template <> struct Made<0> {{ int work(int x) {{ return x; }} }};
int main_{number}() {{ return Made<{}>().work({number}); }}
"#,
        12 + number
    )
}
