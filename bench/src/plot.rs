//! `plot`: a picture of a record, as SVG: bars side by side, each with the range of its rounds.
//!
//! | scenario    | groups            | bars, one colour each                | height                              | line          |
//! |-------------|-------------------|--------------------------------------|-------------------------------------|---------------|
//! | `apps`      | programs          | sides that are not disk swap         | times faster than swap on that disk | 1: as fast    |
//! | `iozone`    | IOzone's columns  | sides, and what document 001 had     | times faster than without           | 1: as fast    |
//! | `limits`    | limits of a pool  | sides and orders; a picture for each disk | hits in %; times faster than plain | -; 1: as fast |
//! | `sweep`     | sizes of a cache; how full it is when pages leave | disks, and orders  | times faster than each page by itself | 1: as fast |
//! | `writeback` | bytes of a write  | fio, ours                            | MB/s                                | -             |
//!
//! From the record alone, so that it can be drawn again from what is kept in bench/records. Heights are on a scale of powers of ten
//! where they are ratios: twice as fast is as far from 1 as half as fast.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use serde_json::Value;

use crate::stat::Spread;
use crate::table::size;

const SIZE: (u32, u32) = (1100, 480);
/// Pictures of one record stand below each other.
const LEFT: u32 = 70;
const BOTTOM: u32 = 50;
/// Of the width of a group, what its bars take.
const BARS_SHARE: f64 = 0.8;
/// Above the highest bar there is room for the legend; on a scale of ratios more.
const ABOVE: (f64, f64) = (1.3, 2.5);
/// A scale of ratios goes at least so far down and up.
const RATIOS: (f64, f64) = (0.5, 2.0);

/// One picture.
#[derive(Debug, PartialEq)]
struct Bars {
    title: String,
    unit: &'static str,
    groups: Vec<String>,
    series: Vec<Series>,
    are_ratios: bool,
}

/// Bars of one colour: one for each group, or none where nothing was measured.
#[derive(Debug, PartialEq)]
struct Series {
    name: String,
    values: Vec<Option<Spread>>,
}

/// Draws the record at `from` into `to`.
///
/// # Errors
/// There is no such record, or none of a scenario with pictures; the file cannot be written.
pub fn run(from: &Path, to: &Path) -> Result<()> {
    let text = fs::read_to_string(from).with_context(|| from.display().to_string())?;
    let record: Value = serde_json::from_str(&text).with_context(|| format!("{} is no record", from.display()))?;
    let pictures = pictures_of(&record).with_context(|| from.display().to_string())?;
    let size = (SIZE.0, SIZE.1 * pictures.len() as u32);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE).map_err(drawn)?;
        for (area, bars) in root.split_evenly((pictures.len(), 1)).iter().zip(&pictures) {
            bars.draw(area)?;
        }
        root.present().map_err(drawn)?;
    }
    fs::write(to, svg).with_context(|| to.display().to_string())?;
    println!("{}", to.display());
    Ok(())
}

fn drawn(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot be drawn: {error}")
}

fn pictures_of(record: &Value) -> Result<Vec<Bars>> {
    let pictures = match record["scenario"].as_str() {
        Some("apps") => of_apps(record),
        Some("iozone") => of_iozone(record),
        Some("limits") => of_limits(record),
        Some("sweep") => of_sweep(record),
        Some("writeback") => of_writeback(record),
        Some(other) => bail!("there are pictures of apps, iozone, limits, sweep and writeback, not of {other}"),
        None => bail!("no scenario is named"),
    };
    ensure!(pictures.iter().any(|bars| !bars.groups.is_empty()), "nothing was measured");
    Ok(pictures)
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned)).collect()
}

fn spread(value: &Value) -> Option<Spread> {
    let number = |name: &str| value[name].as_f64();
    Some(Spread { median: number("median")?, min: number("min")?, max: number("max")? })
}

fn summary(record: &Value) -> impl Iterator<Item = &Value> {
    record["summary"].as_array().into_iter().flatten()
}

fn of_apps(record: &Value) -> Vec<Bars> {
    let lines = summary(record).filter_map(Value::as_array).flatten();
    let programs: Vec<&Value> = lines.filter(|line| line["times_faster"].is_array()).collect();
    let sides = programs.first().map(|program| texts(&program["sides"])).unwrap_or_default();
    let of_side = |(nth, name): (usize, String)| {
        let values = programs.iter().map(|program| spread(&program["times_faster"][nth])).collect();
        Series { name, values }
    };
    let named = |program: &&Value| {
        let ratio = program["ratio"].as_f64().map_or(String::new(), |ratio| format!(" ({ratio:.1} : 1)"));
        format!("{}{ratio}", program["program"].as_str().unwrap_or_default())
    };
    vec![Bars {
        title: "apps: beside swap on the same disk, in half of the memory".into(),
        unit: "times faster",
        groups: programs.iter().map(named).collect(),
        series: sides.into_iter().enumerate().map(of_side).collect(),
        are_ratios: true,
    }]
}

fn of_iozone(record: &Value) -> Vec<Bars> {
    let lines: Vec<&Value> = summary(record).filter(|line| line["column"].is_string()).collect();
    let each = |name: &str| {
        let mut each: Vec<&str> = Vec::new();
        for text in lines.iter().filter_map(|line| line[name].as_str()) {
            if !each.contains(&text) {
                each.push(text);
            }
        }
        each
    };
    let (columns, sides) = (each("column"), each("side"));
    let of_way = |through: &str| {
        let line = |side: &str, column: &str| {
            lines.iter().find(|line| line["side"] == side && line["column"] == column && line["through"] == through)
        };
        let of_side = |side: &&str| {
            let values = columns.iter().map(|column| spread(&line(side, column)?["ratio"])).collect();
            Series { name: (*side).to_owned(), values }
        };
        let published = |column: &&str| Spread::of(line(sides.first()?, column)?["in_document_001"].as_f64());
        let published = Series { name: "document 001".into(), values: columns.iter().map(published).collect() };
        Bars {
            title: format!("iozone through {through}: with the cache, beside without"),
            unit: "times faster",
            groups: columns.iter().map(|column| (*column).to_owned()).collect(),
            series: sides.iter().map(of_side).chain([published]).collect(),
            are_ratios: true,
        }
    };
    each("through").into_iter().map(of_way).collect()
}

/// A picture of the sizes, and one of each size whose threshold was varied.
fn of_sweep(record: &Value) -> Vec<Bars> {
    let mut pictures: Vec<(Option<u64>, Vec<&Value>)> = Vec::new();
    for line in summary(record) {
        let cache = match line["sweep"].as_str() {
            Some("size") => None,
            Some("percent") => line["cache_bytes"].as_u64(),
            _ => continue,
        };
        match pictures.iter_mut().find(|(of, _)| *of == cache) {
            Some((_, lines)) => lines.push(line),
            None => pictures.push((cache, vec![line])),
        }
    }
    pictures.into_iter().map(|(cache, lines)| of_one_sweep(cache, &lines)).collect()
}

fn of_one_sweep(cache: Option<u64>, lines: &[&Value]) -> Bars {
    let field = if cache.is_none() { "cache_bytes" } else { "percent" };
    let name = |line: &Value| Some(format!("{}, {}", line["disk"].as_str()?, line["order"].as_str()?));
    let (values, series) = side_by_side(lines, field, name, |line| spread(&line["measured"]["ratio"]));
    Bars {
        title: match cache {
            None => "sweep: size of the compressed cache".into(),
            Some(bytes) => {
                format!("sweep: how full a compressed cache of {} is when pages begin to leave", size(bytes))
            }
        },
        unit: "times faster",
        groups: match cache {
            None => values.iter().map(|bytes| size(*bytes)).collect(),
            Some(_) => values.iter().map(|percent| format!("{percent} %")).collect(),
        },
        series,
        are_ratios: true,
    }
}

/// Two pictures of each disk.
fn of_limits(record: &Value) -> Vec<Bars> {
    let of_disk = |disk: &'static str| {
        let lines: Vec<&Value> = summary(record).filter(|line| line["disk"] == disk).collect();
        let name = |line: &Value| {
            let order = line["order"].as_str()?.replace('_', " ");
            Some(format!("{}, {order}", line["side"].as_str()?))
        };
        let picture = move |field: &str, title: &str, unit, are_ratios| {
            let (percents, series) = side_by_side(&lines, "percent", name, |line| spread(&line[field]));
            let title = format!("limits, {disk} disk: {title}, by the pool's limit in percent of the file");
            let groups = percents.iter().map(|percent| format!("{percent} %")).collect();
            Bars { title, unit, groups, series, are_ratios }
        };
        [
            picture("hit_percent", "what the pool had of what it was asked for", "%", false),
            picture("ratio", "speed beside the kernel's page cache in the same memory", "times faster", true),
        ]
    };
    let pictures = ["fast", "ssd", "throttled"].into_iter().flat_map(of_disk);
    pictures.filter(|bars| !bars.groups.is_empty()).collect()
}

/// The values that `field` has, in order, and what is said of each by lines of one name.
fn side_by_side(
    lines: &[&Value],
    field: &str,
    name: impl Fn(&Value) -> Option<String>,
    said: impl Fn(&Value) -> Option<Spread>,
) -> (Vec<u64>, Vec<Series>) {
    let mut values: Vec<u64> = lines.iter().filter_map(|line| line[field].as_u64()).collect();
    values.sort_unstable();
    values.dedup();
    let mut names: Vec<String> = Vec::new();
    for name in lines.iter().filter_map(|line| name(line)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let of_series = |named: String| {
        let line = |value: &u64| {
            lines.iter().find(|line| line[field] == *value && name(line).as_deref() == Some(named.as_str()))
        };
        let values = values.iter().map(|value| said(line(value)?)).collect();
        Series { name: named, values }
    };
    let series = names.into_iter().map(of_series).collect();
    (values, series)
}

fn of_writeback(record: &Value) -> Vec<Bars> {
    let runs: Vec<&Value> = record["runs"].as_array().into_iter().flatten().collect();
    let mut sizes: Vec<u64> = runs.iter().filter_map(|run| run["segment_bytes"].as_u64()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let series = |name: &str, field: &str| {
        let of_size = |size: &u64| {
            let of_this = runs.iter().filter(|run| run["segment_bytes"] == *size);
            Spread::of(of_this.filter_map(|run| run[field].as_f64()))
        };
        Series { name: name.to_owned(), values: sizes.iter().map(of_size).collect() }
    };
    vec![Bars {
        title: "writeback: what is written at a time, and how fast all of it".into(),
        unit: "MB/s",
        groups: sizes.iter().map(|size| format!("{} KiB", size >> 10)).collect(),
        series: vec![series("fio", "fio_mb_per_s"), series("ours", "mb_per_s")],
        are_ratios: false,
    }]
}

impl Bars {
    fn draw<'a>(&self, area: &DrawingArea<SVGBackend<'a>, Shift>) -> Result<()> {
        let ends = |pick: fn(&Spread) -> f64| self.series.iter().flat_map(|series| &series.values).flatten().map(pick);
        let most = ends(|spread| spread.max).fold(if self.are_ratios { RATIOS.1 } else { 0.0 }, f64::max);
        let most = most * if self.are_ratios { ABOVE.1 } else { ABOVE.0 };
        let least = if self.are_ratios { ends(|spread| spread.min).fold(RATIOS.0, f64::min) / 1.1 } else { 0.0 };
        let count = self.groups.len() as f64;
        let mut chart = ChartBuilder::on(area);
        chart.caption(&self.title, ("sans-serif", 18)).margin(10).x_label_area_size(BOTTOM).y_label_area_size(LEFT);
        // The two scales are of different types.
        if self.are_ratios {
            let mut chart = chart.build_cartesian_2d(0.0..count, (least..most).log_scale()).map_err(drawn)?;
            self.fill(&mut chart, 1.0)
        } else {
            let mut chart = chart.build_cartesian_2d(0.0..count, least..most).map_err(drawn)?;
            self.fill(&mut chart, least)
        }
    }

    /// Above the half with the lower bars.
    fn legend_side(&self) -> SeriesLabelPosition {
        let half = self.groups.len() / 2;
        let highest = |groups: std::ops::Range<usize>| {
            let of_these = self.series.iter().flat_map(|series| series.values.get(groups.clone()).unwrap_or_default());
            of_these.flatten().map(|spread| spread.max).fold(0.0, f64::max)
        };
        if highest(0..half) < highest(self.groups.len() - half..self.groups.len()) {
            SeriesLabelPosition::UpperLeft
        } else {
            SeriesLabelPosition::UpperRight
        }
    }

    fn fill<'a, Y>(
        &self,
        chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, Y>>,
        foot: f64,
    ) -> Result<()>
    where
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let count = self.groups.len();
        let name = |at: &f64| {
            let is_middle = (at.fract() - 0.5).abs() < 0.01;
            let nth = (*at as usize).min(count.saturating_sub(1));
            if is_middle { self.groups[nth].clone() } else { String::new() }
        };
        // As many labels as there are borders and middles.
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .y_labels(20)
            .x_labels(2 * count + 1)
            .x_label_formatter(&name)
            .y_desc(self.unit);
        mesh.draw().map_err(drawn)?;
        chart.draw_series([PathElement::new([(0.0, foot), (count as f64, foot)], BLACK)]).map_err(drawn)?;
        let width = BARS_SHARE / self.series.len().max(1) as f64;
        for (nth, series) in self.series.iter().enumerate() {
            let colour = Palette99::pick(nth).to_rgba();
            let left = |group: usize| group as f64 + (1.0 - BARS_SHARE) / 2.0 + width * nth as f64;
            let there = || series.values.iter().enumerate().filter_map(|(group, value)| Some((left(group), (*value)?)));
            let bar = |(left, value): (f64, Spread)| {
                Rectangle::new([(left, foot), (left + width * 0.9, value.median)], colour.filled())
            };
            let drawn_bars = chart.draw_series(there().map(bar)).map_err(drawn)?;
            drawn_bars
                .label(&series.name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
            let range = |(left, value): (f64, Spread)| {
                let middle = left + width * 0.45;
                PathElement::new([(middle, value.min), (middle, value.max)], BLACK)
            };
            chart.draw_series(there().map(range)).map_err(drawn)?;
        }
        let mut legend = chart.configure_series_labels();
        legend.position(self.legend_side()).background_style(WHITE.mix(0.8)).border_style(BLACK);
        legend.draw().map_err(drawn)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(value: f64) -> Option<Spread> {
        Spread::of([value])
    }

    #[test]
    fn a_record_of_each_kind_becomes_bars() {
        let spread = |value: f64| json!({"median": value, "min": value, "max": value});
        let apps = json!({"scenario": "apps", "summary": [
            {"question": "sort"},
            [{"program": "sort", "ratio": 3.04, "sides": ["zram:lz4", "spill:lz4"], "times_faster": [spread(3.0), null]}],
            [{"target": "none of these"}],
        ]});
        let [bars] = &pictures_of(&apps).unwrap()[..] else { panic!() };
        assert_eq!(bars.groups, ["sort (3.0 : 1)"]);
        assert_eq!(bars.series[0], Series { name: "zram:lz4".into(), values: vec![one(3.0)] });
        assert_eq!(bars.series[1], Series { name: "spill:lz4".into(), values: vec![None] });

        let line = |through: &str, side: &str, ratio: f64| json!({"through": through, "side": side, "column": "read", "ratio": spread(ratio), "in_document_001": 2.41});
        let iozone = json!({"scenario": "iozone", "summary": [
            line("mmap", "mount", 1.5), line("mmap", "origin", 0.5), line("read/write", "origin", 2.0),
            {"target": "not this"},
        ]});
        let pictures = pictures_of(&iozone).unwrap();
        assert_eq!(pictures.len(), 2);
        let values = |bars: &Bars| bars.series.iter().map(|series| series.values[0]).collect::<Vec<_>>();
        assert_eq!(values(&pictures[0]), [one(1.5), one(0.5), one(2.41)]);
        assert_eq!(values(&pictures[1]), [None, one(2.0), None]);

        let line = |sweep: &str, cache: u64, percent: u64, order: &str, ratio: f64| json!({"sweep": sweep, "disk": "fast", "order": order, "cache_bytes": cache, "percent": percent, "measured": {"ratio": spread(ratio)}});
        let sweep = json!({"scenario": "sweep", "summary": [
            {"pages": 1000},
            line("size", 1 << 20, 50, "random", 2.0), line("size", 1 << 18, 50, "sequential", 0.5),
            line("percent", 1 << 20, 50, "random", 2.0), line("percent", 1 << 20, 10, "random", 1.0),
        ]});
        let pictures = pictures_of(&sweep).unwrap();
        assert_eq!([&pictures[0].groups, &pictures[1].groups], [&["256 KiB", "1 MiB"], &["10 %", "50 %"]]);
        assert_eq!(pictures[0].series[0], Series { name: "fast, random".into(), values: vec![None, one(2.0)] });
        assert_eq!(pictures[0].series[1], Series { name: "fast, sequential".into(), values: vec![one(0.5), None] });
        assert_eq!(pictures[1].series[0].values, [one(1.0), one(2.0)]);

        let line = |disk: &str, order: &str, percent: u64, hits: f64| json!({"disk": disk, "order": order, "side": "mount", "percent": percent, "hit_percent": spread(hits), "ratio": spread(2.0)});
        let limits = json!({"scenario": "limits", "summary": [line("fast", "random_read", 10, 9.0), line("fast", "random_read", 1, 0.5)]});
        let [hits, ratios] = &pictures_of(&limits).unwrap()[..] else { panic!() };
        assert_eq!(hits.groups, ["1 %", "10 %"]);
        assert_eq!(hits.series, [Series { name: "mount, random read".into(), values: vec![one(0.5), one(9.0)] }]);
        assert!(ratios.are_ratios && ratios.series[0].values == [one(2.0), one(2.0)]);
        let disks = ["fast", "ssd", "throttled"].map(|disk| line(disk, "uniform_read", 1, 0.5));
        assert_eq!(pictures_of(&json!({"scenario": "limits", "summary": disks})).unwrap().len(), 6);

        let run = |size: u64, ours: f64| json!({"segment_bytes": size, "fio_mb_per_s": 900.0, "mb_per_s": ours});
        let writeback =
            json!({"scenario": "writeback", "runs": [run(1 << 20, 700.0), run(1 << 18, 500.0), run(1 << 20, 800.0)]});
        let [bars] = &pictures_of(&writeback).unwrap()[..] else { panic!() };
        assert_eq!(bars.groups, ["256 KiB", "1024 KiB"]);
        assert_eq!(bars.series[1].values, [one(500.0), Some(Spread { median: 750.0, min: 700.0, max: 800.0 })]);
    }

    #[test]
    fn what_has_no_picture_is_refused_by_name() {
        let refused = |record: Value| pictures_of(&record).unwrap_err().to_string();
        assert!(refused(json!({"scenario": "dd"})).contains("not of dd"));
        assert_eq!(refused(json!({"scenario": "apps", "summary": []})), "nothing was measured");
        assert_eq!(refused(json!([1])), "no scenario is named");
    }

    #[test]
    fn bars_that_are_drawn_say_what_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("record"), directory.path().join("plot.svg"));
        let run = |size: u64| json!({"segment_bytes": size, "fio_mb_per_s": 900.0, "mb_per_s": 500.0});
        let record =
            json!({"scenario": "writeback", "runs": (16..=24).map(|shift| run(1 << shift)).collect::<Vec<_>>()});
        fs::write(&from, record.to_string()).unwrap();
        super::run(&from, &to).unwrap();
        let svg = fs::read_to_string(&to).unwrap();
        for said in ["writeback: what is written", "64 KiB", "16384 KiB", "MB/s", "fio", "ours"] {
            assert!(svg.contains(said), "no {said:?} in {svg}");
        }
        assert!(super::run(&to, &from).is_err(), "a picture is no record");
    }
}
