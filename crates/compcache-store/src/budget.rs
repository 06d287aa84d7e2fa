//! How much memory may be held, and how much is.
//!
//! Two sums, both in bytes of memory the system gave (arena pages touched, table pages), never payload:
//!
//! | sum       | contains                                | used for        |
//! |-----------|-----------------------------------------|-----------------|
//! | `used`    | pages touched                           | what is shown   |
//! | `charged` | `used` and the credit workers hold      | what is limited |
//!
//! A worker takes credit for a few pages *before* it compresses, so any number of concurrent writers stay below the limit
//! together; in the usual case its object falls into a page already touched, the credit stays with the worker, and the
//! shared words are not written at all. Example: limit 1 MiB, two workers with 16 KiB of credit each: pages are
//! touched up to 1 MiB less what the two still hold.
//!
//! At the limit the budget refuses, and goes on refusing until `charged` has fallen to 90 %, so that a full store does
//! not flip between the two states at every page.
//!
//! No locks; the words are independent counters.
//!
//! # Source
//! The hysteresis of `zswap_check_limits()` and `accept_threshold_percent`, Linux `mm/zswap.c`.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::StoreError;
use crate::page::PAGE_SIZE;

const PAGE: u64 = PAGE_SIZE as u64;

/// Credit a worker asks for at a time, and the least it must hold before it compresses a page: an object may touch two
/// new pages and its span descriptor one.
pub(crate) const CREDIT_STEP: u64 = 4 * PAGE;
pub(crate) const CREDIT_LEAST: u64 = 3 * PAGE;

/// The memory of one store.
pub(crate) struct Budget {
    limit: AtomicU64,
    charged: AtomicU64,
    used: AtomicU64,
    used_max: AtomicU64,
    refusing: AtomicBool,
}

/// Memory a worker may touch without asking. Belongs to the budget it came from.
#[derive(Default)]
pub(crate) struct Credit {
    pub bytes: u64,
    /// Objects go where memory is already, or nowhere.
    pub reserve_only: bool,
}

impl Credit {
    /// Uses `bytes` of the credit for memory that is touched now.
    ///
    /// The credit must cover them; should it not, the debt is charged past the limit rather than forgotten.
    pub fn spend(&mut self, bytes: u64, budget: &Budget) {
        if bytes > self.bytes {
            debug_assert!(false, "a worker spent more than it had");
            budget.charge(bytes - self.bytes);
            self.bytes = bytes;
        }
        self.bytes -= bytes;
        budget.touched(bytes);
    }
}

/// Where acceptance begins again below a limit: 90 % of it.
pub(crate) fn accept_bytes(limit: u64) -> u64 {
    limit - limit / 10
}

impl Budget {
    pub fn new(limit: u64) -> Budget {
        let zero = || AtomicU64::new(0);
        let refusing = AtomicBool::new(false);
        Budget { limit: AtomicU64::new(limit), charged: zero(), used: zero(), used_max: zero(), refusing }
    }

    /// Makes sure that `credit` suffices for one object, or says why it may not be stored.
    #[inline]
    pub fn admit(&self, credit: &mut Credit) -> Result<(), StoreError> {
        if credit.bytes >= CREDIT_LEAST && !self.refusing.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.admit_slow(credit)
    }

    #[cold]
    fn admit_slow(&self, credit: &mut Credit) -> Result<(), StoreError> {
        let missing = if credit.bytes >= CREDIT_LEAST { 0 } else { CREDIT_STEP - credit.bytes };
        self.try_charge(missing)?;
        credit.bytes += missing;
        Ok(())
    }

    /// Charges `bytes`, or refuses, this and what comes until nine tenths are reached.
    pub fn try_charge(&self, bytes: u64) -> Result<(), StoreError> {
        if self.refusing.load(Ordering::Relaxed) {
            let (used_bytes, limit_bytes) = (self.charged.load(Ordering::Relaxed), self.limit_bytes());
            if used_bytes > accept_bytes(limit_bytes) {
                return Err(StoreError::LimitReached { used_bytes, limit_bytes });
            }
        }
        let charged = self.charge_if_it_fits(bytes);
        if self.refusing.load(Ordering::Relaxed) != charged.is_err() {
            self.refusing.store(charged.is_err(), Ordering::Relaxed);
        }
        charged
    }

    /// Charges `bytes` if that stays within the limit, also while writes are refused. If not, nobody else is refused for it: for the
    /// reserve, for the tables of same-filled pages, and for what gives back more than it takes.
    pub fn charge_if_it_fits(&self, bytes: u64) -> Result<(), StoreError> {
        let limit_bytes = self.limit_bytes();
        let fits = |charged: u64| charged.checked_add(bytes).filter(|sum| *sum <= limit_bytes);
        let charged = self.charged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        charged.map(drop).map_err(|used_bytes| StoreError::LimitReached { used_bytes, limit_bytes })
    }

    /// Whether `bytes` more would stay within nine tenths of the limit: room for what is convenient but not needed.
    pub fn has_ample_room(&self, bytes: u64) -> bool {
        let charged = self.charged.load(Ordering::Relaxed);
        charged.saturating_add(bytes) <= accept_bytes(self.limit.load(Ordering::Relaxed))
    }

    /// Refuses what would pass the limit now. Charges nothing, and whoever asks for less is not refused for it.
    pub fn must_fit(&self, bytes: u64) -> Result<(), StoreError> {
        let (used_bytes, limit_bytes) = (self.charged.load(Ordering::Relaxed), self.limit_bytes());
        match used_bytes.saturating_add(bytes) > limit_bytes {
            true => Err(StoreError::LimitReached { used_bytes, limit_bytes }),
            false => Ok(()),
        }
    }

    /// Whether more is charged than so many hundredths of the limit.
    pub fn is_above(&self, percent: u64) -> bool {
        self.charged.load(Ordering::Relaxed) > self.limit.load(Ordering::Relaxed) / 100 * percent
    }

    /// Charges `bytes` whatever the limit says: for table pages of moves, which must not fail.
    pub fn charge(&self, bytes: u64) {
        self.charged.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes back a charge that was not used.
    pub fn uncharge(&self, bytes: u64) {
        self.charged.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Memory charged before has been touched.
    pub fn touched(&self, bytes: u64) {
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if used > self.used_max.load(Ordering::Relaxed) {
            self.used_max.fetch_max(used, Ordering::Relaxed);
        }
    }

    /// Memory has gone back to the system.
    pub fn released(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.uncharge(bytes);
    }

    #[cfg(test)]
    pub fn charged_bytes(&self) -> u64 {
        self.charged.load(Ordering::Relaxed)
    }

    pub fn used_bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub fn used_max_bytes(&self) -> u64 {
        self.used_max.load(Ordering::Relaxed)
    }

    pub fn limit_bytes(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    pub fn set_limit_bytes(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
        self.refusing.store(self.charged.load(Ordering::Relaxed) > limit, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_budget_refuses_until_nine_tenths() {
        let budget = Budget::new(100 * PAGE);
        for _ in 0..100 {
            budget.try_charge(PAGE).unwrap();
        }
        assert!(budget.try_charge(PAGE).is_err());
        for still_charged in (91..100).rev() {
            budget.uncharge(PAGE);
            assert!(budget.try_charge(PAGE).is_err(), "accepted at {still_charged} %");
        }
        budget.uncharge(PAGE);
        assert!(budget.try_charge(PAGE).is_ok(), "refused at 90 %");
    }

    #[test]
    fn concurrent_charges_never_pass_the_limit() {
        let budget = Budget::new(1000);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        if budget.try_charge(7).is_ok() {
                            assert!(budget.charged.load(Ordering::Relaxed) <= 1000);
                            budget.uncharge(7);
                        }
                    }
                });
            }
        });
        assert_eq!(budget.charged.load(Ordering::Relaxed), 0);
    }
}
