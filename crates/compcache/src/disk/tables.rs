//! What a person reads.

use std::collections::BTreeMap;
use std::fmt::Write;

use compcache_block::BelowStats;
use compcache_cache::CacheStats;
use compcache_store::{TABLE, Unit};

use crate::control::{DailyState, DiskState, Durations, OriginState};
use crate::size::Shown;

const COLUMNS: [&str; 10] =
    ["NAME", "DISKSIZE", "DATA", "COMPR", "ALGORITHM", "TOTAL", "RATIO", "HITS", "MOUNTPOINT", "DEVICE"];

/// The disks in the manner of zramctl. A disk with an origin has hits: reads that were found in memory.
pub fn list(disks: &[DiskState], mounts: &BTreeMap<String, String>) -> String {
    let rows: Vec<[String; COLUMNS.len()]> = disks.iter().map(|disk| row(disk, mounts)).collect();
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).chain([COLUMNS[column].len()]).max().unwrap_or_default()
    };
    let widths: [usize; COLUMNS.len()] = std::array::from_fn(width);
    let mut text = String::new();
    for row in [COLUMNS.map(str::to_owned)].iter().chain(&rows) {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
            1..=3 | 5..=7 => format!("{cell:>width$}"),
            _ => format!("{cell:<width$}"),
        });
        text += cells.collect::<Vec<_>>().join(" ").trim_end();
        text.push('\n');
    }
    text
}

fn row(disk: &DiskState, mounts: &BTreeMap<String, String>) -> [String; COLUMNS.len()] {
    // No blanks within a cell, for `awk`.
    let bytes = |name: &str| Shown(disk.stat(name)).to_string().replace(' ', "");
    [
        disk.name.clone(),
        bytes("disksize"),
        bytes("orig_data_size"),
        bytes("compr_data_size"),
        disk.codec.clone(),
        bytes("mem_used_total"),
        ratio(disk).map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
        disk.origin.as_ref().map_or_else(|| "-".into(), |_| format!("{}%", disk.stat("hit_percent"))),
        mounts.get(&disk.at).map_or_else(|| "-".into(), |place| one_word(place)),
        disk.at.clone(),
    ]
}

/// A path for a table: what is a blank, or would do something to the terminal, as `\xNN`.
fn one_word(path: &str) -> String {
    let mut word = String::new();
    for letter in path.chars() {
        let code = u32::from(letter);
        match letter {
            letter if letter != '\\' && !letter.is_control() && !letter.is_whitespace() => word.push(letter),
            _ if code < 0x100 => word += &format!("\\x{code:02x}"),
            letter => word.extend(letter.escape_unicode()),
        }
    }
    word
}

/// How many bytes of data a byte of memory holds, all of ours counted.
fn ratio(disk: &DiskState) -> Option<f64> {
    let used = disk.stat("mem_used_total");
    (used > 0).then(|| disk.stat("orig_data_size") as f64 / used as f64)
}

/// Every statistic with its meaning, and how long reads and writes took.
pub fn show(disk: &DiskState) -> String {
    let mut text = format!("{}\n  at                {}\n  codec             {}\n", disk.name, disk.at, disk.codec);
    if !matches!(disk.recompress.as_str(), "" | "none") {
        let after_s = disk.recompress_after_ms as f64 / 1000.0;
        let _ = writeln!(text, "  recompress        {}, what was not used for {after_s} s", disk.recompress);
    }
    if let Some(of) = &disk.origin {
        return text + &shown_over(disk, of);
    }
    if let Some(of) = &disk.backing {
        let [capacity, live, dead, free] =
            [of.capacity_bytes, of.live_bytes, of.dead_bytes, of.free_bytes].map(|bytes| Shown(bytes).to_string());
        let _ = writeln!(text, "  backing           {}: {}", of.path.display(), of.health);
        let _ = writeln!(text, "  backing room      {capacity}: {live} in use, {dead} to be cleaned, {free} free");
        if let Some(percent) = of.above_percent {
            let _ = writeln!(text, "  backing begins    above {percent} % of a limit");
        }
        if let Some(daily) = &of.daily {
            text += &shown_daily(&disk.name, daily);
        }
        let _ = writeln!(
            text,
            "  backing errors    writes {}, reads {}, not what was written {}",
            of.failed_writes, of.failed_reads, of.damaged_reads
        );
    }
    for stat in TABLE {
        let value = disk.stat(stat.name);
        let shown = match stat.unit {
            Unit::Bytes if value == u64::MAX => "none".into(),
            Unit::Bytes => Shown(value).to_string(),
            Unit::Percent => format!("{value} %"),
            Unit::Pages | Unit::Operations => value.to_string(),
        };
        let _ = writeln!(text, "  {:<17} {shown:<12} {}", stat.name, stat.meaning);
    }
    text += "\n  latency, us        count        min        avg        p50        p99        max\n";
    text += &latency("reads", &disk.latency.reads);
    text += &latency("writes", &disk.latency.writes);
    text
}

/// What is written in a day; and when no more may be, what that means and what can be done.
fn shown_daily(name: &str, daily: &DailyState) -> String {
    let written = Shown(daily.written_bytes);
    let Some(budget_bytes) = daily.budget_bytes else {
        return format!("  backing written   {written} in the last day, with no budget\n");
    };
    let budget = Shown(budget_bytes);
    let mut text = format!("  backing written   {written} of {budget} in the last day; times spent: {}\n", daily.waits);
    if daily.is_spent {
        text += "                    blocks stay in memory, and what does not fit there is refused; for more:\n";
        let _ = writeln!(text, "                    compcache disk change {name} --backing-daily SIZE");
    }
    text
}

/// What is known of a disk with an origin.
fn shown_over(disk: &DiskState, of: &OriginState) -> String {
    let mut text = format!("  origin            {}\n", of.path);
    if !of.is_direct {
        text += "                    its file system has no direct input and output: the page cache holds a part of it, too\n";
    }
    if of.left_out_bytes > 0 {
        let _ = writeln!(
            text,
            "                    its last {} bytes are no whole block, and not shown",
            of.left_out_bytes
        );
    }
    let _ = writeln!(text, "  {:<17} {:<12} Size of the disk.", "disksize", Shown(disk.stat("disksize")).to_string());
    // The cache's files are pieces of the origin, and say nothing to anybody.
    let cache = CacheStats::TABLE.iter().map(|row| (row.0, row.2)).filter(|(name, _)| *name != "files");
    for (name, meaning) in cache.chain(BelowStats::TABLE.iter().map(|row| (row.0, row.2))) {
        let value = disk.stat(name);
        let shown = match name {
            "orig_data_size" | "compr_data_size" | "mem_used_total" | "memlimit" | "mem_lent" => {
                Shown(value).to_string()
            }
            "hit_percent" => format!("{value} %"),
            _ => value.to_string(),
        };
        let _ = writeln!(text, "  {name:<17} {shown:<12} {meaning}");
    }
    text
}

fn latency(name: &str, of: &Durations) -> String {
    let mut line = format!("  {name:<12} {:>11}", of.count);
    for ns in [of.min_ns, of.avg_ns, of.p50_ns, of.p99_ns, of.max_ns] {
        let _ = write!(line, " {:>10.2}", ns as f64 / 1000.0);
    }
    line + "\n"
}

/// The statistics under the names ramzswap printed, in its units: sizes in kilobytes.
pub fn ramzswap(disk: &DiskState) -> String {
    let mut text = String::new();
    for stat in TABLE.iter().filter(|stat| !stat.ramzswap.is_empty()) {
        let value = disk.stat(stat.name);
        let shown = match stat.unit {
            Unit::Bytes if value == u64::MAX => "none".into(),
            Unit::Bytes => format!("{:>8} kB", value.div_ceil(1024)),
            Unit::Percent => format!("{value:>8} %"),
            Unit::Pages | Unit::Operations => format!("{value:>8}"),
        };
        let _ = writeln!(text, "{:<14} {shown}", format!("{}:", stat.ramzswap));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(at: &str, stats: &[(&str, u64)]) -> DiskState {
        DiskState {
            name: "a".into(),
            at: at.into(),
            codec: "lz4".into(),
            for_swap: false,
            recompress: "zstd:3".into(),
            recompress_after_ms: 60_000,
            backing: None,
            origin: None,
            stats: stats.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
            latency: Default::default(),
        }
    }

    #[test]
    fn the_list_has_the_columns_of_zramctl_and_says_where_a_disk_is_mounted() {
        let mounts = BTreeMap::from([("/dev/loop7".to_owned(), "/mnt/x".to_owned())]);
        let stats = [("disksize", 4 << 30), ("orig_data_size", 300 << 20), ("mem_used_total", 100 << 20)];
        let text = list(&[disk("/dev/loop7", &stats), disk("nbd://localhost", &[])], &mounts);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], COLUMNS);
        assert_eq!(lines[1][..2], ["a", "4.0GiB"]);
        assert_eq!(lines[1][lines[1].len() - 4..], ["3.00", "-", "/mnt/x", "/dev/loop7"]);
        assert_eq!(lines[2][lines[2].len() - 4..], ["-", "-", "-", "nbd://localhost"]);
    }

    #[test]
    fn a_place_is_one_word_and_does_nothing_to_a_terminal() {
        assert_eq!(one_word("/mnt/Größe"), "/mnt/Größe");
        assert_eq!(one_word("/mnt/a b\\"), r"/mnt/a\x20b\x5c");
        assert_eq!(one_word("/\x1b[2J\u{85}\u{2003}\n"), r"/\x1b[2J\x85\u{2003}\x0a");
    }

    #[test]
    fn every_name_of_ramzswap_is_printed_with_its_unit() {
        let text = ramzswap(&disk("x", &[("disksize", 4096), ("good_compress", 78), ("num_reads", 5)]));
        for line in ["DiskSize:             4 kB", "GoodCompress:        78 %", "NumReads:             5"] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        assert_eq!(text.lines().count(), TABLE.iter().filter(|stat| !stat.ramzswap.is_empty()).count());
    }
}
