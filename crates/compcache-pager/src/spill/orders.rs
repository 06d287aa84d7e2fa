//! Which pages are to be read from the file, and into which of the buffers: an order has one from when it is placed until its page is taken.

/// Records ordered or read and not used yet.
pub const ORDERS: usize = 32;
/// Who waits for a page, and is woken, comes for it sooner.
const COLLECTED_NS: u64 = 10_000_000;

/// Who has the buffer of an order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nobody.
    Free,
    /// Whoever reads next.
    Wanted,
    /// A fetcher, or the handler.
    Reading,
    /// The handler: the record is there.
    Ready,
    /// The handler: it could not be read.
    Failed,
}

/// A page that is to be read.
#[derive(Clone, Copy)]
pub struct Order<R> {
    pub progress: Progress,
    pub page: u64,
    pub record: Option<R>,
    /// Smaller is older.
    pub number: u64,
    /// When somebody ordered it who waits for it; not if it was ordered ahead.
    pub asked_ns: Option<u64>,
    /// If somebody waits for it, since when he can come for it, or since when he is known to wait.
    awaited_ns: Option<u64>,
}

impl<R> Order<R> {
    const NONE: Order<R> =
        Order { progress: Progress::Free, page: 0, record: None, number: 0, asked_ns: None, awaited_ns: None };

    /// It has come to an end, well or not.
    fn is_over(&self) -> bool {
        matches!(self.progress, Progress::Ready | Progress::Failed)
    }

    /// It could not be read, and nobody waited for it when it was ordered.
    fn has_failed_ahead(&self) -> bool {
        self.progress == Progress::Failed && self.asked_ns.is_none()
    }
}

/// All of them; `R` says where the page is in the file.
pub struct Orders<R> {
    pub all: [Order<R>; ORDERS],
    number: u64,
}

impl<R: Copy> Orders<R> {
    pub const fn new() -> Orders<R> {
        Orders { all: [Order::NONE; ORDERS], number: 0 }
    }

    /// Orders a page, if it is not ordered already; `asked_ns` is the time if somebody waits for it, who has it read again if it was ordered ahead and that
    /// failed: the disk may have failed for a moment. False if there is no buffer for it: one that nobody waits for, or
    /// that nobody has come for, is taken only for a page that somebody waits for.
    pub fn place(&mut self, page: u64, record: R, asked_ns: Option<u64>) -> bool {
        let is_there = |order: &&mut Order<R>| order.progress != Progress::Free && order.page == page;
        let place = match self.all.iter_mut().position(|order| is_there(&order)) {
            Some(place) if asked_ns.is_some() && self.all[place].has_failed_ahead() => place,
            Some(place) => {
                let order = &mut self.all[place];
                order.awaited_ns = asked_ns.or(order.awaited_ns);
                return true;
            }
            None => match self.room(asked_ns) {
                Some(place) => place,
                None => return false,
            },
        };
        self.number += 1;
        let (number, progress) = (self.number, Progress::Wanted);
        self.all[place] = Order { progress, page, record: Some(record), number, asked_ns, awaited_ns: asked_ns };
        true
    }

    /// A free place, or one whose page could not be read ahead, or for who waits since `asked_ns` one whose page was read in vain: ahead first, and then for who has not come for it.
    fn room(&self, asked_ns: Option<u64>) -> Option<usize> {
        let all = || self.all.iter();
        let free = all().position(|order| order.progress == Progress::Free);
        if let Some(free) = free.or_else(|| all().position(Order::has_failed_ahead)) {
            return Some(free);
        }
        let now_ns = asked_ns?;
        let is_given_up = |since: u64| now_ns.saturating_sub(since) > COLLECTED_NS;
        let may_go = |(_, order): &(usize, &Order<R>)| order.is_over() && order.awaited_ns.is_none_or(is_given_up);
        let unused = self.all.iter().enumerate().filter(may_go);
        unused.min_by_key(|(_, order)| (order.awaited_ns.is_some(), order.number)).map(|(place, _)| place)
    }

    /// The order at `place` has come to an end: from now on who waits for it can come.
    pub fn end(&mut self, place: usize, is_read: bool, now_ns: u64) {
        let order = &mut self.all[place];
        order.progress = if is_read { Progress::Ready } else { Progress::Failed };
        order.awaited_ns = order.awaited_ns.map(|_| now_ns);
    }

    /// The order of a page that has come to an end, and its place. What was ordered ahead and could not be read has not.
    pub fn ended(&self, page: u64) -> Option<(usize, Order<R>)> {
        let has_ended = |order: &Order<R>| order.page == page && order.is_over() && !order.has_failed_ahead();
        let place = self.all.iter().position(has_ended)?;
        Some((place, self.all[place]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_waits_for_is_kept_until_he_could_have_come_for_it() {
        let mut orders = Orders::new();
        let ms = |ms: u64| ms * 1_000_000;
        // One in four was ordered by who waits, the others ahead.
        let asked = |page: u64| page.is_multiple_of(4).then_some(ms(1));
        (0..ORDERS as u64).for_each(|page| assert!(orders.place(page, (), asked(page))));
        assert!(!orders.place(100, (), None) && !orders.place(100, (), Some(ms(2))), "nothing has been read");
        // Somebody comes to wait for one that was ordered ahead. Reading takes long.
        assert!(orders.place(1, (), Some(ms(2))));
        (0..ORDERS).for_each(|place| orders.end(place, place != 4, ms(50)));
        assert!(!orders.place(100, (), None), "nobody waits for it");
        let placed = (100..).take_while(|page| orders.place(*page, (), Some(ms(55)))).count();
        let stayed: Vec<u64> = (0..ORDERS as u64).filter(|page| orders.ended(*page).is_some()).collect();
        assert_eq!((placed, stayed), (23, vec![0, 1, 4, 8, 12, 16, 20, 24, 28]), "what was read ahead is what goes");
        // Nobody has come.
        assert!(orders.place(200, (), Some(ms(61))));
        assert!(orders.ended(0).is_none() && orders.ended(4).is_some());
    }

    #[test]
    fn what_could_not_be_read_ahead_is_read_again_for_who_waits() {
        let mut orders = Orders::new();
        let end = |orders: &mut Orders<()>, page: u64, is_read| {
            let place = orders.all.iter().position(|order| order.page == page && order.progress == Progress::Wanted);
            orders.end(place.expect("it is wanted"), is_read, 2);
        };
        assert!(orders.place(7, (), None));
        end(&mut orders, 7, false);
        assert!(orders.ended(7).is_none() && orders.place(7, (), None), "ahead it is not tried again");
        assert!(orders.all.iter().all(|order| order.progress != Progress::Wanted));
        assert!(orders.place(7, (), Some(3)));
        end(&mut orders, 7, false);
        assert!(orders.ended(7).is_some_and(|(_, order)| order.progress == Progress::Failed), "he is to know");
        // Somebody came to wait while it was being read: that was before him.
        assert!(orders.place(8, (), None) && orders.place(8, (), Some(4)));
        end(&mut orders, 8, false);
        assert!(orders.ended(8).is_none() && orders.place(8, (), Some(5)));
        end(&mut orders, 8, true);
        assert!(orders.ended(8).is_some());
        // What could not be read ahead is in nobody's way.
        let mut orders = Orders::new();
        (0..ORDERS as u64).for_each(|page| assert!(orders.place(page, (), None)));
        (0..ORDERS).for_each(|place| orders.end(place, place > 0, 2));
        assert!(orders.place(100, (), None) && !orders.place(101, (), None));
    }
}
