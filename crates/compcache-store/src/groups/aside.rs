//! Memory set aside for making groups, while there is some: so that they can be made when there is none.
//!
//! A group takes memory before it gives more of it back. What is set aside is credit against the limit ([`crate::budget`]), of which making one takes
//! at most 40 KiB, and a page that leaves a sparse one 12. All recompressors of a store have it together, so that one that is made when the store is full
//! (a command) works with what another (the thread that does so all the time) has set aside.
//!
//! Lock order: below a slot, above a group.

use super::CREDIT_FOR_GROUP;
use crate::budget::{Budget, Credit};
use crate::error::StoreError;
use crate::page::PAGE_SIZE;

/// The most that is set aside; of a small limit, such a part.
const ASIDE_BYTES: u64 = 256 << 10;
const ASIDE_SHARE: u64 = 64;

/// What is set aside in a store, and how many recompressors it is for. It is given back with the last.
#[derive(Default)]
pub(crate) struct Aside {
    credit: Credit,
    recompressors: usize,
}

impl Aside {
    /// There is one recompressor more.
    pub fn join(&mut self) {
        self.recompressors += 1;
    }

    /// There is one less.
    pub fn leave(&mut self, budget: &Budget) {
        self.recompressors -= 1;
        if self.recompressors == 0 {
            self.give_back(budget);
        }
    }

    /// Nothing is set aside any more.
    pub fn give_back(&mut self, budget: &Budget) {
        budget.uncharge(core::mem::take(&mut self.credit).bytes);
    }

    /// The credit, with enough of it for a group.
    ///
    /// # Errors
    /// [`StoreError::LimitReached`], also where the store has not fallen to 90 % yet, but never before 100 %: what is made
    /// with the credit gives more back than it takes. Nobody else is refused for it.
    pub fn credit(&mut self, budget: &Budget) -> Result<&mut Credit, StoreError> {
        if self.credit.bytes < CREDIT_FOR_GROUP {
            let aside = ASIDE_BYTES.min(budget.limit_bytes() / ASIDE_SHARE) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
            let charge = |wanted: u64| {
                let missing = wanted.saturating_sub(self.credit.bytes);
                budget.charge_if_it_fits(missing).map(|()| missing)
            };
            self.credit.bytes += charge(aside.max(CREDIT_FOR_GROUP)).or_else(|_| charge(CREDIT_FOR_GROUP))?;
        }
        Ok(&mut self.credit)
    }
}
