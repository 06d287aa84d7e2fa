//! Runs of pages: what every transport delivers and every fault wants more of.

use super::read::Then;
use super::{Pool, Read};
use crate::error::StoreError;
use crate::page::{Page, PageIndex};
use crate::worker::Worker;

/// A run that stopped. The pages before `done` were written or read; the one at `done` and those after it were not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped after {done} pages: {error}")]
pub struct RunFailed {
    /// How many pages are done, counted from the first.
    pub done: usize,
    /// Why the next one is not.
    #[source]
    pub error: StoreError,
}

impl Pool {
    /// Writes `pages` as the pages from `first` on. Pages already written stay written if a later one is refused, so the
    /// caller goes on at `done`.
    ///
    /// # Errors
    /// [`RunFailed`], with the error of [`Pool::write`].
    pub fn write_run(&self, worker: &mut Worker, first: PageIndex, pages: &[Page]) -> Result<(), RunFailed> {
        let mut now_ns = worker.now_ns();
        for (done, page) in pages.iter().enumerate() {
            let (written, end_ns) = self.write_from(worker, first.plus(done as u64), page, now_ns);
            written.map_err(|error| RunFailed { done, error })?;
            now_ns = end_ns;
        }
        Ok(())
    }

    /// Reads the pages from `first` on into `pages`, and into `found` what became of each. Absent pages and pages on the
    /// backing device do not stop the run; their buffers are untouched.
    ///
    /// Reads as many as the shorter of the two slices has.
    ///
    /// # Errors
    /// [`RunFailed`] at the first corrupt page, with the error of [`Pool::read`]. The caller may go on after it.
    pub fn read_run(
        &self,
        worker: &mut Worker,
        first: PageIndex,
        pages: &mut [Page],
        found: &mut [Read],
    ) -> Result<(), RunFailed> {
        self.run_from(worker, first, pages, found, Then::Used)
    }

    /// As [`Pool::read_run`], discarding every page that was read.
    ///
    /// # Errors
    /// As [`Pool::read_run`].
    pub fn take_run(
        &self,
        worker: &mut Worker,
        first: PageIndex,
        pages: &mut [Page],
        found: &mut [Read],
    ) -> Result<(), RunFailed> {
        self.run_from(worker, first, pages, found, Then::Taken)
    }

    fn run_from(
        &self,
        worker: &mut Worker,
        first: PageIndex,
        pages: &mut [Page],
        found: &mut [Read],
        then: Then,
    ) -> Result<(), RunFailed> {
        let mut now_ns = worker.now_ns();
        for (done, (page, found)) in pages.iter_mut().zip(found).enumerate() {
            let (read, end_ns) = self.read_from(worker, first.plus(done as u64), page, now_ns, then);
            *found = read.map_err(|error| RunFailed { done, error })?;
            now_ns = end_ns;
        }
        Ok(())
    }
}
