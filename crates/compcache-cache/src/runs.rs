//! What is read below at once.

use std::iter;
use std::ops::Range;

/// So many pages that were found between two runs are read once more, so that one read suffices: 64 KiB take less time than asking a disk again
/// (45 us on a fast one, which gives as much in 40; 1.4 ms on one with 700 operations a second, which gives it in 0.9).
const GAP_PAGES: usize = 16;

/// The runs to be read below if these pages were found: they begin and end with pages that were not. Where such a run cannot be read, those of
/// [`exactly_missing`] may.
pub fn missing(found: &[bool]) -> impl Iterator<Item = Range<usize>> {
    runs(found, GAP_PAGES)
}

/// The runs of pages that were not found.
pub fn exactly_missing(found: &[bool]) -> impl Iterator<Item = Range<usize>> {
    runs(found, 0)
}

fn runs(found: &[bool], gap_pages: usize) -> impl Iterator<Item = Range<usize>> {
    let mut next = 0;
    iter::from_fn(move || {
        let start = next + found[next..].iter().position(|found| !found)?;
        let mut end = start;
        while let Some(gap) = found[end..].iter().take(gap_pages + 1).position(|found| !found) {
            end += gap + 1;
        }
        next = end;
        Some(start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_what_was_not_found_and_short_gaps() {
        let runs = |found: &[bool]| missing(found).map(|run| (run.start, run.end)).collect::<Vec<_>>();
        let (yes, no) = (true, false);
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[yes, yes]), []);
        assert_eq!(runs(&[no, no, yes, no, yes]), [(0, 4)]);
        let with_gap = |pages: usize| [[no].as_slice(), &vec![yes; pages], &[no, no, yes]].concat();
        assert_eq!(runs(&with_gap(16)), [(0, 19)]);
        assert_eq!(runs(&with_gap(17)), [(0, 1), (18, 20)]);
        let exactly: Vec<_> = exactly_missing(&[no, no, yes, no, yes]).map(|run| (run.start, run.end)).collect();
        assert_eq!(exactly, [(0, 2), (3, 4)]);
    }

    #[test]
    fn every_page_that_was_not_found_is_in_a_run_and_no_run_ends_with_another() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..1000 {
            let found: Vec<bool> = (0..rng.usize(0..300)).map(|_| rng.u32(0..12) > 0).collect();
            let runs: Vec<_> = missing(&found).collect();
            assert!(runs.iter().all(|run| !found[run.start] && !found[run.end - 1]));
            assert!(runs.windows(2).all(|two| two[1].start - two[0].end > GAP_PAGES));
            let is_in_run = |page| runs.iter().any(|run| run.contains(&page));
            assert!((0..found.len()).all(|page| found[page] || is_in_run(page)));
        }
    }
}
