//! What a run was worth, on one screen.

use std::fmt::{self, Write};

use crate::run::stats::Stats;
use crate::size::Shown;

/// Growth over a limit by less than a hundredth is not worth a word.
const NOTED_SHARE: u64 = 100;
/// Growth by more than a tenth is more than the limit's own gap: the content did not fit.
const GAP_SHARE: u64 = 10;
/// So much any process has of libraries, ours among them, and of its own file.
const FILES_BYTES: u64 = 32 << 20;
/// To be held up for less is not worth a word.
const HELD_NOTED_S: f64 = 0.1;
/// As a shell shows it.
const KILLED_STATUS: i32 = 128 + 9;
/// A program that ran so long without a pager never got one.
const STARTED_S: f64 = 1.0;

/// The text for standard error after `program` has ended.
pub fn render(stats: &Stats, program: &str) -> String {
    let mut text = String::new();
    write_summary(&mut text, stats, program).expect("a String takes everything");
    text
}

fn write_summary(out: &mut String, stats: &Stats, program: &str) -> fmt::Result {
    if stats.evicted_pages == 0 {
        write_one_line(out, stats, program)?;
    } else {
        write_screen(out, stats, program)?;
    }
    if let Some(what) = &stats.trouble {
        writeln!(out, "  WARNING: {what}.")?;
        writeln!(out, "  What runs unpaged is held to no limit; `compcache doctor` shows what this machine permits.")?;
    }
    if stats.unpaged_copies != 0 {
        let copies = stats.unpaged_copies;
        writeln!(out, "  note: {copies} copies made past the C library (a bare clone) ran correctly, but unpaged.")?;
    }
    write_uncounted(out, stats)?;
    write_kill(out, stats, program)?;
    write_growth(out, stats)
}

/// Nothing had to be compressed.
fn write_one_line(out: &mut String, stats: &Stats, program: &str) -> fmt::Result {
    if stats.processes_total == 0 && stats.trouble.is_some() {
        return writeln!(out, "compcache: {program} was not paged.");
    } else if stats.processes_total == 0 && stats.wall_s < STARTED_S {
        return writeln!(out, "compcache: {program} ended before it was paged.");
    } else if stats.processes_total == 0 {
        writeln!(out, "compcache: WARNING: {program} ran unpaged: the preloaded object did not get into it.")?;
        return writeln!(
            out,
            "  Either the loader says why above, or it was started with another environment (env -i)."
        );
    }
    let limits = limits(stats);
    match stats.total_peak_bytes {
        // It ended before its pager measured anything.
        0 => writeln!(out, "compcache: {program} stayed within {limits}: nothing was compressed."),
        peak => writeln!(out, "compcache: {program} needed {} of {limits}: nothing was compressed.", Shown(peak)),
    }
}

fn write_screen(out: &mut String, stats: &Stats, program: &str) -> fmt::Result {
    let row = |out: &mut String, name: &str, value: String| writeln!(out, "  {name:<18}{value}");
    let (stored, compressed) = (stats.orig_data_peak_bytes, stats.compr_data_at_peak_bytes);
    let held = stats.mem_used_at_peak_bytes;
    writeln!(out, "compcache: {program} ran {:.1} s with {}", stats.wall_s, limits(stats))?;
    row(out, "peak resident", Shown(stats.resident_peak_bytes).to_string())?;
    row(out, "peak total", format!("{} (resident and everything of ours)", Shown(stats.total_peak_bytes)))?;
    row(out, "stored at peak", format!("{} in {}", Shown(stored), Shown(held)))?;
    row(out, "ratio", format!("{} ({} of payload)", times(stored, compressed), Shown(compressed)))?;
    row(out, "memory saved", Shown(stored.saturating_sub(held)).to_string())?;
    row(
        out,
        "faults",
        format!(
            "{} ({} from the pool), p50 {}, p99 {}",
            count(stats.faults),
            count(stats.faults_stored),
            Latency(stats.fault_p50_ns),
            Latency(stats.fault_p99_ns)
        ),
    )?;
    row(
        out,
        "evicted pages",
        format!(
            "{}, second chances {}, unchanged {}, patched {}",
            count(stats.evicted_pages),
            count(stats.refaults_staged),
            count(stats.unchanged_pages),
            count(stats.patched_pages)
        ),
    )?;
    let hits = percent(stats.readahead_hits, stats.readahead_pages);
    row(out, "read-ahead", format!("{} pages, {hits} were hits", count(stats.readahead_pages)))?;
    if stats.recompressed_pages != 0 {
        row(out, "recompressed", format!("{} pages that were not used for a while", count(stats.recompressed_pages)))?;
    }
    if stats.spill_written_pages != 0 {
        let (peak, written, read) = (stats.spill_peak_bytes, stats.spill_written_pages, stats.spill_read_pages);
        let pages = format!("{} pages at peak", count(stats.spilled_pages_peak));
        let moved = format!("{} pages written, {} read", count(written), count(read));
        row(out, "spill", format!("{} for {pages}, {moved}", Shown(peak)))?;
    }
    if stats.held_s >= HELD_NOTED_S {
        row(out, "held up", format!("{:.1} s in all, while more memory came than could leave", stats.held_s))?;
    }
    row(out, "processes", format!("{}, each exec counted", count(stats.processes_total)))
}

/// A process that had more than the limit, and more than all that is counted.
fn write_uncounted(out: &mut String, stats: &Stats) -> fmt::Result {
    let limit = if stats.ram_limit_bytes != 0 { stats.ram_limit_bytes } else { stats.resident_limit_bytes };
    let counted = limit.max(stats.total_peak_bytes);
    if stats.max_rss_bytes <= counted + counted / GAP_SHARE + FILES_BYTES
        || stats.trouble.is_some()
        || stats.unpaged_copies != 0
    {
        return Ok(());
    }
    writeln!(
        out,
        "  note: one process had {} at a time: it ran unpaged (a static or set-user-ID program, or one with another environment), or much of that \
         was files and shared memory; neither is counted.",
        Shown(stats.max_rss_bytes)
    )
}

/// Whoever sends SIGKILL does not say why; the kernel may have, for lack of memory.
fn write_kill(out: &mut String, stats: &Stats, program: &str) -> fmt::Result {
    let is_near = stats.ram_limit_bytes != 0 && stats.total_peak_bytes > stats.ram_limit_bytes / 8 * 7;
    if stats.exit_status != Some(KILLED_STATUS) || !is_near {
        return Ok(());
    }
    let less = ((stats.ram_limit_bytes / 8 * 7) >> 20).max(1);
    writeln!(
        out,
        "  {program} was killed (SIGKILL). If that was the kernel, for a memory cgroup or a machine that was full (`dmesg` says so), leave it more: --ram {less}M"
    )
}

/// By how much a limit was exceeded, and what would help.
fn write_growth(out: &mut String, stats: &Stats) -> fmt::Result {
    let over = |peak: u64, limit: u64, share| (limit != 0 && peak > limit + limit / share).then(|| Shown(peak - limit));
    let (total, ram) = (stats.total_peak_bytes, stats.ram_limit_bytes);
    if stats.trouble.is_some() || stats.unpaged_copies != 0 {
        // The reason stands above: neither the content, nor what another limit or codec would help.
        let limits = [("--ram", total, ram), ("--resident", stats.resident_peak_bytes, stats.resident_limit_bytes)];
        let mut exceeded =
            limits.into_iter().filter_map(|(name, peak, limit)| Some((name, over(peak, limit, GAP_SHARE)?)));
        return exceeded.try_for_each(|(name, over)| writeln!(out, "  over {name} by {over}."));
    }
    if let Some(over) = over(total, ram, GAP_SHARE) {
        let (stored, compressed) = (stats.orig_data_peak_bytes, stats.compr_data_at_peak_bytes);
        let (spills, held) = (stats.spill_written_pages != 0, stats.mem_used_at_peak_bytes);
        let why = match (stored < 2 * compressed, spills) {
            (true, false) => "the content compresses badly",
            (true, true) => "it grew faster than its pages could be written, or the files could take no more",
            (false, _) if held >= ram => "even compressed it was more than that",
            (false, _) => {
                "it grew faster than pages could leave, uses more than that at once, or has memory that cannot leave (locked, or read-only)"
            }
        };
        writeln!(out, "  over --ram by {over}: {why}. Nothing was lost.")?;
        let enough = (total + total / 10).next_multiple_of(1 << 20) >> 20;
        let ram = format!("--ram {enough}M or more");
        let others = [(!spills, "--spill DIR"), (!stats.is_zstd, "--codec zstd (smaller, slower)")];
        let all: Vec<_> = others.iter().filter(|(helps, _)| *helps).map(|(_, what)| *what).collect();
        let all = [&[ram.as_str()][..], &all].concat().join(", or ");
        writeln!(out, "  What would help: {all}.")?;
    } else if let Some(over) = over(total, ram, NOTED_SHARE) {
        writeln!(out, "  over --ram by {over} for a moment, which is within its gap of a tenth.")?;
    }
    if let Some(over) = over(stats.resident_peak_bytes, stats.resident_limit_bytes, GAP_SHARE) {
        writeln!(out, "  over --resident by {over}: it grew faster than pages could leave, or locked them.")?;
    }
    Ok(())
}

fn limits(stats: &Stats) -> String {
    match (stats.ram_limit_bytes, stats.resident_limit_bytes) {
        (ram, 0) => format!("--ram {}", Shown(ram)),
        (0, resident) => format!("--resident {}", Shown(resident)),
        (ram, resident) => format!("--ram {} --resident {}", Shown(ram), Shown(resident)),
    }
}

/// `5.9`, or a word where there is nothing to divide by.
fn times(whole: u64, part: u64) -> String {
    match part {
        0 if whole == 0 => "none".into(),
        0 => "all same-filled".into(),
        part => format!("{:.2}", whole as f64 / part as f64),
    }
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "none".into() } else { format!("{:.0} %", part as f64 * 100.0 / whole as f64) }
}

/// `1234567` as `1 234 567`.
fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index != 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// Nanoseconds for a reader.
struct Latency(u64);

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ns if ns < 1_000 => write!(f, "{ns} ns"),
            ns if ns < 1_000_000 => write!(f, "{:.1} us", ns as f64 / 1e3),
            ns => write!(f, "{:.1} ms", ns as f64 / 1e6),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn stats() -> Stats {
        Stats {
            ram_limit_bytes: 512 * MIB,
            resident_peak_bytes: 400 * MIB,
            total_peak_bytes: 510 * MIB,
            processes_total: 3,
            orig_data_peak_bytes: 1180 * MIB,
            compr_data_at_peak_bytes: 100 * MIB,
            mem_used_at_peak_bytes: 104 * MIB,
            faults: 1_234_567,
            evicted_pages: 2_000_000,
            recompressed_pages: 40_000,
            spill_written_pages: 5_000,
            spill_read_pages: 1_200,
            spilled_pages_peak: 4_000,
            spill_peak_bytes: 12 * MIB,
            readahead_pages: 100,
            readahead_hits: 97,
            fault_p50_ns: 7_100,
            fault_p99_ns: 1_200_000,
            ..Stats::default()
        }
    }

    #[test]
    fn a_run_within_its_limit_fits_one_screen() {
        let text = render(&stats(), "sort");
        for part in [
            "ratio             11.80",
            "1 234 567",
            "1.1 GiB",
            "97 %",
            "40 000 pages that were not used",
            "12.0 MiB for 4 000 pages at peak, 5 000 pages written, 1 200 read",
            "p50 7.1 us, p99 1.2 ms",
            "512.0 MiB",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("would help"), "{text}");
        assert!(text.lines().count() < 24);
    }

    #[test]
    fn growth_over_the_limit_says_what_would_help() {
        let text = render(&Stats { total_peak_bytes: 700 * MIB, ..stats() }, "sort");
        assert!(text.contains("over --ram by 188.0 MiB") && text.contains("--codec zstd"), "{text}");
    }

    #[test]
    fn what_is_too_large_compressed_is_told_so() {
        let text =
            render(&Stats { total_peak_bytes: 700 * MIB, mem_used_at_peak_bytes: 600 * MIB, ..stats() }, "luajit");
        assert!(text.contains("by 188.0 MiB: even compressed it was more than that."), "{text}");
    }

    #[test]
    fn what_is_done_already_is_no_advice() {
        let grown = Stats { total_peak_bytes: 700 * MIB, is_zstd: true, ..stats() };
        let text = render(&grown, "sort");
        assert!(text.contains("--ram 770M or more.\n"), "{text}");
    }

    #[test]
    fn who_was_killed_near_the_limit_is_told_what_it_may_have_been() {
        let killed =
            |total_peak_bytes| render(&Stats { exit_status: Some(KILLED_STATUS), total_peak_bytes, ..stats() }, "sort");
        assert!(killed(510 * MIB).contains("--ram 448M") && !killed(100 * MIB).contains("SIGKILL"));
        let by_resident =
            Stats { exit_status: Some(KILLED_STATUS), ram_limit_bytes: 0, resident_limit_bytes: 512 * MIB, ..stats() };
        assert!(!render(&by_resident, "sort").contains("--ram"), "there is none");
    }

    #[test]
    fn growth_of_what_ran_unpaged_is_not_laid_to_the_content() {
        let grown = || Stats { total_peak_bytes: 700 * MIB, ..stats() };
        let trouble = Stats { trouble: Some("userfaultfd was refused".into()), ..grown() };
        for (stats, why) in [(trouble, "userfaultfd was refused"), (Stats { unpaged_copies: 2, ..grown() }, "unpaged")]
        {
            let text = render(&stats, "sort");
            let (warned, told) = (text.find(why), text.find("over --ram by 188.0 MiB.\n"));
            assert!(warned.is_some() && warned < told, "{text}");
            assert!(!text.contains("would help") && !text.contains("compresses badly"), "{text}");
        }
    }

    #[test]
    fn a_program_that_fits_gets_one_line() {
        let text = render(&Stats { evicted_pages: 0, total_peak_bytes: 90 * MIB, ..stats() }, "sort");
        assert_eq!(text, "compcache: sort needed 90.0 MiB of --ram 512.0 MiB: nothing was compressed.\n");
    }

    #[test]
    fn a_process_that_had_more_than_is_counted_is_told_of() {
        let text = |max_rss_bytes| render(&Stats { max_rss_bytes, ..stats() }, "sort");
        assert!(text(900 * MIB).contains("one process had 900.0 MiB at a time"), "{}", text(900 * MIB));
        assert!(!text(590 * MIB).contains("at a time"));
        let grown = Stats { max_rss_bytes: 720 * MIB, total_peak_bytes: 700 * MIB, ..stats() };
        assert!(!render(&grown, "sort").contains("at a time"), "it is counted");
        let paged_not = Stats { max_rss_bytes: 900 * MIB, unpaged_copies: 1, ..stats() };
        assert!(!render(&paged_not, "sort").contains("at a time"), "the reason is told");
    }

    #[test]
    fn an_unpaged_process_is_warned_about() {
        let text = render(&Stats { trouble: Some("userfaultfd was refused".into()), ..stats() }, "sort");
        assert!(text.contains("WARNING") && text.contains("userfaultfd was refused"), "{text}");
    }
}
