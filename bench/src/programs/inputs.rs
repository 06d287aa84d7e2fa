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

type Make = fn(&Path, bool) -> Result<Program>;

const ALL: [(&str, Make); 6] =
    [("python", python), ("sort", sort), ("gcc", gcc), ("sqlite", sqlite), ("node", node), ("java", java)];

/// The programs called `only`, or all; their input goes into `directory`.
///
/// # Errors
/// No program has such a name, or an input cannot be written.
pub fn make_all(directory: &Path, quick: bool, only: &[String]) -> Result<Vec<Program>> {
    if let Some(unknown) = only.iter().find(|word| !ALL.iter().any(|(name, _)| name == word)) {
        bail!("no program is called {unknown:?}");
    }
    let wanted = ALL.iter().filter(|(name, _)| only.is_empty() || only.iter().any(|word| word == name));
    wanted.map(|(_, make)| make(directory, quick)).collect()
}

fn program<W: Into<OsString>>(name: &'static str, words: impl IntoIterator<Item = W>) -> Program {
    Program { name, words: words.into_iter().map(Into::into).collect(), environment: Vec::new() }
}

fn python(directory: &Path, quick: bool) -> Result<Program> {
    let script = write(directory, "dict.py", include_str!("dict.py"))?;
    let entries = if quick { "30000" } else { "200000" };
    let mut program = program("python", ["python3".into(), script.into_os_string(), entries.into()]);
    program.environment.push(("PYTHONHASHSEED", "1".into()));
    Ok(program)
}

fn sort(directory: &Path, quick: bool) -> Result<Program> {
    let path = directory.join("lines.txt");
    let mut file = BufWriter::new(File::create(&path)?);
    let mut rng = fastrand::Rng::with_seed(11);
    let names = ["alder", "birch", "cedar", "elm", "fir", "hazel", "juniper", "larch", "maple", "oak", "rowan", "yew"];
    for _ in 0..if quick { 300_000 } else { 700_000 } {
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

fn gcc(directory: &Path, quick: bool) -> Result<Program> {
    let path = write(directory, "large.cpp", &cpp_source(if quick { 4 } else { 20 }))?;
    let words = ["g++", "-O1", "-w", "-S", "-o", "-"];
    Ok(program("gcc", words.into_iter().map(OsString::from).chain([path.into_os_string()])))
}

fn sqlite(directory: &Path, quick: bool) -> Result<Program> {
    let script = sql_script(if quick { 150_000 } else { 400_000 });
    let path = write(directory, "tables.sql", &script)?;
    Ok(program(
        "sqlite",
        ["sqlite3".to_owned(), "-batch".to_owned(), ":memory:".to_owned(), format!(".read {}", path.display())],
    ))
}

fn node(directory: &Path, quick: bool) -> Result<Program> {
    let script = write(directory, "objects.js", include_str!("objects.js"))?;
    let entries = if quick { "50000" } else { "250000" };
    // In a memory cgroup it would make its young generation smaller, and need less memory than under us.
    let sizes = ["--max-old-space-size=1024", "--max-semi-space-size=16"].map(OsString::from);
    let words = [OsString::from("node")].into_iter().chain(sizes).chain([script.into_os_string(), entries.into()]);
    Ok(program("node", words))
}

fn java(directory: &Path, quick: bool) -> Result<Program> {
    let source = write(directory, "Maps.java", include_str!("Maps.java"))?;
    let entries = if quick { "50000" } else { "250000" };
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
