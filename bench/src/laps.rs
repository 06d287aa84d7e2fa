//! Questions whose answer is a list of laps (`scan`, `hotcold`): the table that is printed for each.
//!
//! The first lap differs from the later ones and stands apart. `x` columns say how many times longer than the first
//! side a side takes, in the same round; below 1 the other side is faster. `total` is sampled in the same way for every
//! side, and what ours says itself if that is more; what of it is resident and what holds compressed pages, ours says itself. `group` is another count of memory, with the page
//! cache and the kernel's own memory in it ([`crate::run::Peak::group_bytes`]), and `x group` that in times of the first side's.

use serde_json::{Value, json};

use crate::compare::{Answers, laps};
use crate::side::SideRun;
use crate::stat::Spread;
use crate::table::{Table, cell, mib};

/// Microseconds by the clock for a touch in the first pass.
pub fn first_us(run: &SideRun) -> Option<f64> {
    let all = laps(run);
    all.iter().find(|lap| lap["lap"] == "pass")?["us_per_touch"].as_f64()
}

/// The median over the passes after the first (the only one, when there is but one).
pub fn later_us(run: &SideRun) -> Option<f64> {
    later(run, |lap| lap["us_per_touch"].as_f64())
}

/// Microseconds of CPU, of all threads of the worker, for a touch in the later passes.
pub fn later_cpu_us(run: &SideRun) -> Option<f64> {
    later(run, |lap| Some((lap["user_s"].as_f64()? + lap["sys_s"].as_f64()?) * 1e6 / lap["touches"].as_f64()?))
}

/// Seconds of CPU of the whole machine for the whole run: kernel threads and servers of disks are in it, and whatever else ran.
pub fn machine_cpu_s(run: &SideRun) -> Option<f64> {
    Some(run.outcome.machine_cpu_s)
}

/// The most memory that was seen, everything counted.
pub fn total_bytes(run: &SideRun) -> Option<f64> {
    Some(run.total_bytes() as f64)
}

fn later(run: &SideRun, number: impl Fn(&Value) -> Option<f64>) -> Option<f64> {
    let passes: Vec<f64> = laps(run).iter().filter(|lap| lap["lap"] == "pass").filter_map(number).collect();
    let later = if passes.len() > 1 { &passes[1..] } else { &passes[..] };
    Spread::of(later.iter().copied()).map(|spread| spread.median)
}

/// Prints the table, and returns it for the record.
pub fn print(answers: &Answers) -> Value {
    let mut table = Table::new(&[
        "side",
        "fill",
        "first",
        "later us/touch",
        "CPU us",
        "x wall",
        "x CPU",
        "machine CPU s",
        "x machine",
        "resident MiB",
        "held MiB",
        "total MiB",
        "group MiB",
        "x group",
    ]);
    let mut lines = Vec::new();
    for (nth, side) in answers.sides.iter().enumerate() {
        let later_spread = answers.spread(nth, later_us);
        let wall = answers.ratio(nth, 0, later_us);
        let cpu = answers.ratio(nth, 0, later_cpu_us);
        let group = answers.ratio(nth, 0, SideRun::group_bytes);
        let machine_cpu = answers.ratio(nth, 0, machine_cpu_s);
        let median = |number: fn(&SideRun) -> Option<f64>| answers.spread(nth, number).map(|spread| spread.median);
        let short = |value: Option<f64>| cell(value.map(|value| format!("{value:.1}")));
        let bytes = |value: Option<f64>| cell(value.map(|value| mib(value as u64)));
        let fill = |run: &SideRun| laps(run).iter().find(|lap| lap["lap"] == "fill")?["us_per_touch"].as_f64();
        table.line([
            side.to_string(),
            short(median(fill)),
            short(median(first_us)),
            cell(later_spread),
            short(median(later_cpu_us)),
            cell(wall),
            cell(cpu.map(|spread| format!("{:.2}", spread.median))),
            short(median(machine_cpu_s)),
            cell(machine_cpu.map(|spread| format!("{:.2}", spread.median))),
            bytes(median(|run| Some(run.resident_bytes() as f64))),
            bytes(median(|run| Some(run.held_bytes() as f64))),
            bytes(median(total_bytes)),
            bytes(median(SideRun::group_bytes)),
            cell(group.map(|spread| format!("{:.2}", spread.median))),
        ]);
        lines.push(json!({
            "side": side.to_string(), "later_us": later_spread, "times_first_side_wall": wall, "times_first_side_cpu": cpu,
            "times_first_side_machine_cpu": machine_cpu, "times_first_side_group": group,
        }));
    }
    print!("{table}");
    Value::Array(lines)
}
