//! How much is written in a day, and how much may be: flash wears out by being written to.
//!
//! What is written is counted by quarters of an hour. A segment may be written if the quarter that has begun, the 96 before
//! it, and the segment come to no more than the budget. Any 24 hours that end now lie within these 97 quarters, so no 24 hours
//! ever have more than the budget; and what was written counts for a quarter of an hour too long at most. Example, with 2 GiB a day:
//!
//! | time           | written | in 97 quarters | next segment may be written      |
//! |----------------|---------|----------------|----------------------------------|
//! | Monday, 9:05   | 1.5 GiB | 1.5 GiB        | now                              |
//! | Monday, 20:20  | 0.5 GiB | 2 GiB          | on Tuesday at 9:15: 1.5 GiB then |
//! | Tuesday, 9:10  |         | 2 GiB          | at 9:15                          |
//! | Tuesday, 9:15  |         | 0.5 GiB        | now                              |
//!
//! A token bucket would say the same with two numbers, but not do it: one that holds C and gets r a second lets C + 86 400 r
//! through in a day. To keep the promise it must hold little, and then nothing can be written in a hurry, though the day's
//! budget is whole; or get little, and then a busy disk is left half of the budget.
//!
//! All is counted that the medium is asked to write, whole segments: pages that leave, what cleaning moves, and what failed, of
//! which nobody knows how much has arrived. It is counted before it is written, so that two flights cannot both have the last of it.
//! It is counted without a budget, too: one that is set counts what was written before.
//!
//! No clock: the time is the workers'. A copy of the process goes on counting by itself from what its parent had written.

use core::sync::atomic::Ordering::Relaxed;

use super::{Backing, Health};

const SPAN_NS: u64 = 15 * 60 * 1_000_000_000;
/// These make a day.
const SPANS: u64 = 96;
/// Those, and the one that has begun.
const COUNTED: usize = SPANS as usize + 1;

/// What was written to a backing in a day, and may be ([`Backing::daily_writes`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DailyWrites {
    /// The most that is written in any 24 hours; `None`: as much as there is.
    pub budget_bytes: Option<u64>,
    /// What was written in the last 24 hours, and up to a quarter of an hour more.
    pub written_bytes: u64,
    /// After how long the next segment may be written; `None`: never, the budget is less than a segment.
    pub wait_ns: Option<u64>,
    /// How often something should have been written and the budget was spent.
    pub waits: u64,
}

/// What was written, by quarters of an hour.
pub(super) struct Daily {
    budget_bytes: Option<u64>,
    /// The quarter of an hour that has begun, counted from the clock's zero.
    span: u64,
    /// Bytes written in that one and those before it, each at its number modulo their count.
    written: [u64; COUNTED],
}

impl Daily {
    pub fn new() -> Daily {
        Daily { budget_bytes: None, span: 0, written: [0; COUNTED] }
    }

    /// Forgets what is too long ago. The time of a thread that looked at the clock earlier does not turn it back.
    fn advance(&mut self, now_ns: u64) {
        let span = (now_ns / SPAN_NS).max(self.span);
        for begun in (self.span + 1..=span).take(COUNTED) {
            self.written[place_of(begun)] = 0;
        }
        // After a gap longer than all that is counted, the loop has gone round once.
        self.span = span;
    }

    fn written_bytes(&self) -> u64 {
        self.written.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// After how long so many bytes may be written; `None`: never.
    fn wait_ns(&mut self, now_ns: u64, bytes: u64) -> Option<u64> {
        self.advance(now_ns);
        let Some(budget_bytes) = self.budget_bytes else { return Some(0) };
        let most_before = budget_bytes.checked_sub(bytes)?;
        let (mut written_bytes, mut at_ns) = (self.written_bytes(), now_ns);
        for span in self.span.saturating_sub(SPANS)..=self.span {
            if written_bytes <= most_before {
                break;
            }
            written_bytes = written_bytes.saturating_sub(self.written[place_of(span)]);
            at_ns = (span + COUNTED as u64).saturating_mul(SPAN_NS);
        }
        Some(at_ns.saturating_sub(now_ns))
    }

    fn may_write(&mut self, now_ns: u64, bytes: u64) -> bool {
        self.advance(now_ns);
        let with_these = self.written_bytes().checked_add(bytes);
        self.budget_bytes.is_none_or(|budget_bytes| with_these.is_some_and(|bytes| bytes <= budget_bytes))
    }

    /// Counts what is about to be written. `false`: it may not be.
    fn take(&mut self, now_ns: u64, bytes: u64) -> bool {
        let may_write = self.may_write(now_ns, bytes);
        if may_write {
            let written = &mut self.written[place_of(self.span)];
            *written = written.saturating_add(bytes);
        }
        may_write
    }
}

fn place_of(span: u64) -> usize {
    (span % COUNTED as u64) as usize
}

impl Backing {
    /// The most that is written to the medium in any 24 hours, in bytes.
    pub fn daily_bytes(&self) -> Option<u64> {
        self.daily.lock().budget_bytes
    }

    /// Changes that, from now on: `None` is as much as there is, and with less than a segment nothing is written. What was
    /// written before counts. A flight that is in the air arrives.
    pub fn set_daily_bytes(&self, budget_bytes: Option<u64>) {
        self.daily.lock().budget_bytes = budget_bytes;
        self.end_spent(0);
    }

    /// What was written in a day and may be, as of now by the clock of the workers. Ends [`Health::Spent`] if its time is over.
    pub fn daily_writes(&self, now_ns: u64) -> DailyWrites {
        self.end_spent(now_ns);
        let mut daily = self.daily.lock();
        let wait_ns = daily.wait_ns(now_ns, self.segment_bytes as u64);
        DailyWrites {
            budget_bytes: daily.budget_bytes,
            written_bytes: daily.written_bytes(),
            wait_ns,
            waits: self.counts.daily_waits.load(Relaxed),
        }
    }

    /// Whether another segment may be written now.
    pub(super) fn may_write(&self, now_ns: u64) -> bool {
        self.daily.lock().may_write(now_ns, self.segment_bytes as u64)
    }

    /// Counts a segment that is about to be written. `false`: it may not be.
    pub(super) fn take_from_daily(&self, now_ns: u64) -> bool {
        self.daily.lock().take(now_ns, self.segment_bytes as u64)
    }

    /// Something is to be written, and may not be. A medium that failed is not known to be better for that.
    pub(super) fn note_spent(&self) {
        let mut health = self.health.lock();
        if !matches!(*health, Health::Spent | Health::Failing(_)) {
            *health = Health::Spent;
            self.counts.daily_waits.fetch_add(1, Relaxed);
        }
    }

    /// A segment has arrived. That it was the last of the day may have been found out while it was in the air.
    pub(super) fn note_arrived(&self, now_ns: u64) {
        let may_write = self.may_write(now_ns);
        let mut health = self.health.lock();
        if may_write || *health != Health::Spent {
            *health = Health::Good;
        }
    }

    /// Ends [`Health::Spent`] if a segment may be written by now.
    pub(super) fn end_spent(&self, now_ns: u64) {
        if self.health() != Health::Spent || !self.may_write(now_ns) {
            return;
        }
        let mut health = self.health.lock();
        if *health == Health::Spent {
            *health = Health::Good;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_NS: u64 = 4 * SPAN_NS;
    const DAY_NS: u64 = 24 * HOUR_NS;

    fn daily(budget_bytes: u64) -> Daily {
        Daily { budget_bytes: Some(budget_bytes), ..Daily::new() }
    }

    #[test]
    fn the_example_is_what_happens() {
        let (gib, minute_ns) = (1 << 30, HOUR_NS / 60);
        let mut daily = daily(2 * gib);
        assert!(daily.take(9 * HOUR_NS + 5 * minute_ns, gib / 2 * 3));
        assert!(daily.take(20 * HOUR_NS + 20 * minute_ns, gib / 2));
        let tuesday = DAY_NS + 9 * HOUR_NS;
        assert_eq!(daily.wait_ns(20 * HOUR_NS + 20 * minute_ns, 1), Some(tuesday - 20 * HOUR_NS - 5 * minute_ns));
        assert!(!daily.take(tuesday + 10 * minute_ns, 1));
        assert_eq!((daily.written_bytes(), daily.wait_ns(tuesday + 10 * minute_ns, 1)), (2 * gib, Some(5 * minute_ns)));
        assert!(!daily.take(tuesday + 15 * minute_ns, gib / 2 * 3 + 1));
        assert!(daily.take(tuesday + 15 * minute_ns, gib / 2 * 3));
    }

    #[test]
    fn no_24_hours_have_more_than_the_budget_and_nothing_is_refused_that_25_hours_have_room_for() {
        for seed in 0..200 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let budget_bytes = rng.u64(1..1000);
            let mut daily = daily(budget_bytes);
            let (mut now_ns, mut taken) = (rng.u64(0..10 * DAY_NS), Vec::new());
            // Seldom or often, and now and then not for days.
            let step_ns = [SPAN_NS / 50, SPAN_NS, 3 * HOUR_NS][seed as usize % 3];
            for _ in 0..2000 {
                now_ns += if rng.u8(0..200) == 0 { rng.u64(0..3 * DAY_NS) } else { rng.u64(0..step_ns) };
                let bytes = rng.u64(1..=budget_bytes.div_ceil(3));
                let wait_ns = daily.wait_ns(now_ns, bytes).expect("it is no more than the budget");
                let within = |span_ns: u64| -> u64 {
                    taken.iter().rev().take_while(|(at, _)| at + span_ns > now_ns).map(|(_, bytes)| bytes).sum()
                };
                if daily.take(now_ns, bytes) {
                    assert!(within(DAY_NS) + bytes <= budget_bytes, "seed {seed}");
                    assert_eq!(wait_ns, 0, "seed {seed}");
                    taken.push((now_ns, bytes));
                } else {
                    assert!(within(DAY_NS + SPAN_NS) + bytes > budget_bytes, "seed {seed}");
                    assert!((1..=DAY_NS + SPAN_NS).contains(&wait_ns), "seed {seed}: {wait_ns}");
                    // Exactly then.
                    if rng.bool() {
                        assert!(!daily.may_write(now_ns + wait_ns - 1, bytes), "seed {seed}");
                        assert!(daily.may_write(now_ns + wait_ns, bytes), "seed {seed}");
                        now_ns += wait_ns;
                    }
                }
            }
            assert!(taken.len() > 20, "seed {seed}: {} were taken", taken.len());
        }
    }

    #[test]
    fn numbers_at_their_ends_are_no_trouble() {
        assert_eq!(daily(0).wait_ns(0, 1), None);
        assert!(Daily::new().take(u64::MAX, u64::MAX));
        let mut daily = daily(u64::MAX);
        assert!(daily.take(u64::MAX, u64::MAX) && !daily.take(u64::MAX, 1) && daily.take(0, 0));
        assert_eq!(daily.written_bytes(), u64::MAX);
        daily.budget_bytes = None;
        assert!(daily.take(u64::MAX, u64::MAX));
        assert_eq!(daily.written_bytes(), u64::MAX, "it does not begin anew at zero");
    }
}
