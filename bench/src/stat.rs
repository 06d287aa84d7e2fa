//! Medians with their spread, of values and of ratios of runs that belong together.

use std::fmt;

use serde::Serialize;

/// The middle of some values and how far they lie apart.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle value; the mean of the two in the middle of an even number.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// None of no values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let half = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[half] } else { (values[half - 1] + values[half]) / 2.0 };
        Some(Spread { median, min, max })
    }

    /// The spread of `theirs / ours`, round by round: only runs that followed each other are divided.
    pub fn of_ratios(theirs: &[Option<f64>], ours: &[Option<f64>]) -> Option<Spread> {
        let pairs = theirs.iter().zip(ours);
        Spread::of(pairs.filter_map(|(theirs, ours)| Some((*theirs)? / (*ours)?)))
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        let text = format!("{:.digits$} [{:.digits$}..{:.digits$}]", self.median, self.min, self.max);
        // Padding would cut it off after so many characters.
        if f.precision().is_some() { f.write_str(&text) } else { f.pad(&text) }
    }
}

/// A number that is to be reached.
pub struct Target {
    /// What it is about.
    pub about: String,
    /// What was measured, or why nothing was.
    pub measured: Option<Spread>,
    /// The bound on the median.
    pub bound: f64,
    /// Whether the bound is a least value (a ratio) or a most (a time, memory).
    pub at_least: bool,
    /// Printed behind numbers.
    pub unit: &'static str,
}

impl Target {
    /// Whether the median is on the right side of the bound.
    pub fn met(&self) -> Option<bool> {
        let median = self.measured?.median;
        Some(if self.at_least { median >= self.bound } else { median <= self.bound })
    }

    /// How many digits behind the point tell what was measured from the bound: one more than that has, and two at least.
    fn digits(&self) -> usize {
        let bound = self.bound.to_string();
        bound.split_once('.').map_or(2, |(_, behind)| (behind.len() + 1).max(2))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.met() {
            Some(true) => "met   ",
            Some(false) => "MISSED",
            None => "no data",
        };
        let sign = if self.at_least { ">=" } else { "<=" };
        write!(f, "  {word}  {}: wanted {sign} {} {}", self.about, self.bound, self.unit)?;
        match &self.measured {
            Some(spread) => write!(f, ", measured {spread:.*}", self.digits()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_shown_with_as_many_digits_as_are_wanted() {
        let spread = Spread::of([1.0, 2.25, 30.0]).unwrap();
        assert_eq!((spread.to_string(), format!("{spread:.0}")), ("2.25 [1.00..30.00]".into(), "2 [1..30]".into()));
    }

    #[test]
    fn a_spread_has_the_middle_and_both_ends() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([2.0, 1.0, 4.0]).unwrap().to_string(), "2.00 [1.00..4.00]");
    }

    #[test]
    fn ratios_are_of_the_same_round_and_skip_what_is_missing() {
        let ratios = Spread::of_ratios(&[Some(4.0), None, Some(9.0)], &[Some(2.0), Some(1.0), Some(3.0)]);
        assert_eq!(ratios, Some(Spread { median: 2.5, min: 2.0, max: 3.0 }));
    }

    #[test]
    fn a_target_says_on_which_side_of_its_bound_the_median_is() {
        let measured = Spread::of([2.4, 2.6, 2.6]);
        let target = |at_least| Target { about: String::new(), measured, bound: 2.5, at_least, unit: "x" };
        assert_eq!(target(true).met(), Some(true));
        assert_eq!(target(false).met(), Some(false));
        assert!(target(false).to_string().contains("MISSED"));
    }

    #[test]
    fn what_misses_its_bound_by_little_does_not_look_like_it() {
        let shown = |bound, median| {
            let measured = Spread::of([median]);
            Target { about: String::new(), measured, bound, at_least: false, unit: "x" }.to_string()
        };
        assert!(shown(1.02, 1.0214).ends_with("wanted <= 1.02 x, measured 1.021 [1.021..1.021]"));
        assert!(shown(4.0, 4.25).ends_with("wanted <= 4 x, measured 4.25 [4.25..4.25]"));
        assert!(shown(1.1, 1.25).ends_with("measured 1.25 [1.25..1.25]"));
    }
}
