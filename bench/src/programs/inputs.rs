//! The programs and the files they work on, made from fixed seeds so that every run does the same.
//!
//! Node and Java choose the size of their heap, and Java its collector, after the limit of the control group they run
//! in. Here both are told, so that every side runs the same program.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::Program;

/// How much of it.
#[derive(Clone, Copy)]
pub enum Much {
    /// Whether it works.
    Tiny,
    /// Some ten MiB: what a slow disk can take.
    Small,
    /// Up to some hundred MiB.
    Full,
}

impl Much {
    fn of<T>(self, tiny: T, small: T, full: T) -> T {
        match self {
            Much::Tiny => tiny,
            Much::Small => small,
            Much::Full => full,
        }
    }
}

type Make = fn(&Path, Much) -> Result<Program>;

const ALL: [(&str, Make); 12] = [
    ("python", python),
    ("sort", sort),
    ("gcc", gcc),
    ("sqlite", sqlite),
    ("node", node),
    ("java", java),
    ("fft", fft),
    ("simulator", simulator),
    ("simulators", simulators),
    ("build", build),
    ("filter", filter),
    ("redis", redis),
];

/// The programs called `names`; their input goes into `directory`.
///
/// # Errors
/// No program has such a name, or an input cannot be written.
pub fn make_all<W: AsRef<str>>(directory: &Path, much: Much, names: &[W]) -> Result<Vec<Program>> {
    let make = |name: &W| match ALL.iter().find(|(known, _)| *known == name.as_ref()) {
        Some((_, make)) => make(directory, much),
        None => bail!("no program is called {:?}; there are {}", name.as_ref(), ALL.map(|(name, _)| name).join(", ")),
    };
    names.iter().map(make).collect()
}

fn program<W: Into<OsString>>(name: &'static str, words: impl IntoIterator<Item = W>) -> Program {
    let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
    Program { name, needs: vec![words[0].clone()], words, environment: Vec::new() }
}

/// A worker of ours, which lies beside this program.
fn worker(name: &'static str, arguments: &[&str]) -> Result<Program> {
    let path = std::env::current_exe()?.with_file_name(name);
    Ok(program(name, [path.into_os_string()].into_iter().chain(arguments.iter().map(OsString::from))))
}

/// A script of the shell; it is given the directory as its first argument, where it makes one of its own.
fn script(
    name: &'static str,
    text: &str,
    directory: &Path,
    arguments: impl IntoIterator<Item = OsString>,
    needs: &[&str],
) -> Result<Program> {
    let path = write(directory, &format!("{name}.sh"), text)?;
    let words = ["sh".into(), path.into_os_string(), directory.as_os_str().to_owned()];
    let mut program = program(name, words.into_iter().chain(arguments));
    program.needs.extend(needs.iter().map(OsString::from));
    Ok(program)
}

fn python(directory: &Path, much: Much) -> Result<Program> {
    let script = write(directory, "dict.py", include_str!("dict.py"))?;
    let entries = much.of("20000", "60000", "200000");
    let mut program = program("python", ["python3".into(), script.into_os_string(), entries.into()]);
    program.environment.push(("PYTHONHASHSEED", "1".into()));
    Ok(program)
}

fn sort(directory: &Path, much: Much) -> Result<Program> {
    let path = directory.join("lines.txt");
    let mut file = BufWriter::new(File::create(&path)?);
    let mut rng = fastrand::Rng::with_seed(11);
    let names = ["alder", "birch", "cedar", "elm", "fir", "hazel", "juniper", "larch", "maple", "oak", "rowan", "yew"];
    for _ in 0..much.of(100_000, 400_000, 700_000) {
        let mut word = || names[rng.usize(..names.len())];
        let (first, second, third) = (word(), word(), word());
        writeln!(
            file,
            "{first}-{second} {:08} {third} 2026-{:02}-{:02}",
            rng.u32(..100_000_000),
            rng.u8(1..13),
            rng.u8(1..29)
        )?;
    }
    file.flush()?;
    let mut program = program("sort", ["sort".into(), "-S".into(), "1G".into(), path.into_os_string()]);
    program.environment.push(("LC_ALL", "C".into()));
    Ok(program)
}

fn fft(_: &Path, much: Much) -> Result<Program> {
    worker("fft", &[much.of("10", "10", "11")])
}

fn simulator(_: &Path, much: Much) -> Result<Program> {
    worker("simulator", &[much.of("16", "40", "200"), "1"])
}

fn simulators(directory: &Path, much: Much) -> Result<Program> {
    let one = worker("simulator", &[much.of("4", "8", "40")])?;
    let words = [OsString::from("5")].into_iter().chain(one.words);
    script("simulators", include_str!("copies.sh"), directory, words, &[])
}

fn build(directory: &Path, much: Much) -> Result<Program> {
    let sources = directory.join("sources");
    fs::create_dir_all(&sources)?;
    for nth in 0..4 {
        write(&sources, &format!("part{nth}.c"), &c_source(nth, much.of(10, 400, 1000)))?;
    }
    script("build", include_str!("build.sh"), &sources, [], &["make", "gcc"])
}

fn filter(directory: &Path, much: Much) -> Result<Program> {
    let program_text = write(directory, "filter.awk", include_str!("filter.awk"))?;
    let path = directory.join("text.txt");
    let mut file = BufWriter::new(File::create(&path)?);
    let mut rng = fastrand::Rng::with_seed(13);
    let syllables =
        ["ba", "den", "fo", "gar", "kel", "li", "mun", "no", "pra", "rus", "so", "ti", "ul", "ver", "xe", "zy"];
    for _ in 0..much.of(3_000, 20_000, 120_000) {
        // Most words are common, and some are rare, as in texts.
        let mut word = || -> String {
            let length = if rng.u8(..4) == 0 { 5 } else { 2 };
            (0..length).map(|_| syllables[rng.usize(..syllables.len())]).collect()
        };
        let words: Vec<_> = (0..12).map(|_| word()).collect();
        writeln!(file, "{}", words.join(" "))?;
    }
    file.flush()?;
    let words = ["gawk".into(), "-f".into(), program_text.into_os_string(), path.into_os_string()];
    let mut program = program("filter", words);
    program.environment.push(("LC_ALL", "C".into()));
    Ok(program)
}

fn redis(directory: &Path, much: Much) -> Result<Program> {
    let commands = write(directory, "redis.lua", include_str!("redis.lua"))?;
    let words = [commands.into_os_string(), much.of("20000", "150000", "600000").into()];
    script("redis", include_str!("redis.sh"), directory, words, &["redis-server", "redis-cli"])
}

fn gcc(directory: &Path, much: Much) -> Result<Program> {
    let path = write(directory, "large.cpp", &cpp_source(much.of(2, 4, 20)))?;
    let words = ["g++", "-O1", "-w", "-S", "-o", "-"];
    Ok(program("gcc", words.into_iter().map(OsString::from).chain([path.into_os_string()])))
}

fn sqlite(directory: &Path, much: Much) -> Result<Program> {
    let script = sql_script(much.of(80_000, 200_000, 400_000));
    let path = write(directory, "tables.sql", &script)?;
    Ok(program(
        "sqlite",
        ["sqlite3".to_owned(), "-batch".to_owned(), ":memory:".to_owned(), format!(".read {}", path.display())],
    ))
}

fn node(directory: &Path, much: Much) -> Result<Program> {
    let script = write(directory, "objects.js", include_str!("objects.js"))?;
    let entries = much.of("20000", "50000", "250000");
    // In a memory cgroup it would make its young generation smaller, and need less memory than under us.
    let sizes = ["--max-old-space-size=1024", "--max-semi-space-size=16"].map(OsString::from);
    let words = [OsString::from("node")].into_iter().chain(sizes).chain([script.into_os_string(), entries.into()]);
    Ok(program("node", words))
}

fn java(directory: &Path, much: Much) -> Result<Program> {
    let source = write(directory, "Maps.java", include_str!("Maps.java"))?;
    let entries = much.of("20000", "50000", "250000");
    Ok(program(
        "java",
        [
            "java".into(),
            "-XX:+UseSerialGC".into(),
            // In a memory cgroup it would make its heap smaller, and need less memory than under us.
            "-XX:-UseContainerSupport".into(),
            "-Xmx512m".into(),
            source.into_os_string(),
            entries.into(),
        ],
    ))
}

fn write(directory: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = directory.join(name);
    fs::write(&path, text)?;
    Ok(path)
}

/// Heavy headers and `parts` functions over types of their own.
fn cpp_source(parts: usize) -> String {
    let headers = ["algorithm", "functional", "iostream", "map", "regex", "set", "string", "vector"];
    let mut source: String = headers.iter().map(|name| format!("#include <{name}>\n")).collect();
    for nth in 0..parts {
        source.push_str(&format!(
            "struct S{nth} {{ int a[{}]; std::string s; bool operator<(const S{nth}& o) const {{ return s < o.s; }} }};\n\
             double f{nth}(std::vector<S{nth}>& v, std::function<double(const S{nth}&)> g) {{\n  \
             std::map<S{nth}, std::set<std::string>> m; std::sort(v.begin(), v.end()); double sum = {nth};\n  \
             for (auto& t : v) {{ m[t].insert(t.s + \"{nth}\"); sum += g(t) * t.a[0]; }}\n  \
             for (auto& p : m) for (auto& s : p.second) sum += s.size();\n  return sum;\n}}\n",
            nth % 7 + 1
        ));
    }
    source
}

/// `functions` functions with loops and branches over tables of their own.
fn c_source(part: usize, functions: usize) -> String {
    let mut source = String::from("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n");
    for nth in 0..functions {
        let (rows, step) = (nth % 13 + 3, (nth + part) % 5 + 1);
        source.push_str(&format!(
            "static const int table{nth}[{rows}] = {{ {nth}, {part}, {step} }};\n\
             struct row{nth} {{ int key; double value[{rows}]; char name[{}]; struct row{nth} *next; }};\n\
             double part{part}_function{nth}(struct row{nth} *row, int count, const char *name) {{\n  \
             double sum = {nth};\n  for (; row && count > 0; row = row->next, count -= {step}) {{\n    \
             switch (row->key % 5) {{\n      case 0: sum += table{nth}[count % {rows}]; break;\n      \
             case 1: if (!strcmp(row->name, name)) return sum; break;\n      \
             case {step}+1: row->value[count % {rows}] *= sum; break;\n      \
             default: for (int i = 0; i < {rows}; i++) sum += row->value[i] * (i ^ {step});\n    }}\n  }}\n  \
             return sum;\n}}\n",
            nth % 24 + 8
        ));
    }
    source
}

/// A table of `rows` rows, two indexes over it, and queries that walk them.
fn sql_script(rows: usize) -> String {
    format!(
        "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, kind TEXT, price REAL, at TEXT);\n\
         WITH RECURSIVE n(i, r) AS (SELECT 1, 12345 UNION ALL SELECT i + 1, (r * 1103515245 + 12345) % 2147483648 \
         FROM n WHERE i < {rows}) INSERT INTO item SELECT i, 'item-' || (r % 999983) || '-' || i, 'kind-' || (r / 65536 % 53), \
         (r % 99991) / 100.0, datetime(1600000000 + r % 100000000, 'unixepoch') FROM n;\n\
         CREATE INDEX item_name ON item (name);\nCREATE INDEX item_kind ON item (kind, at);\n\
         UPDATE item SET price = price + 1 WHERE id % 3 = 0;\n\
         SELECT kind, count(*), round(sum(price), 2), min(at), max(name) FROM item GROUP BY kind ORDER BY kind;\n\
         SELECT count(*) FROM item a JOIN item b ON b.id = a.id * 7 % {rows} + 1 WHERE a.id % 10 = 0;\n\
         SELECT name, price FROM item ORDER BY name LIMIT 5000;\n"
    )
}
