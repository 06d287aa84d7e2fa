//! Flights that come to nothing, and two at a time.

use super::*;

#[test]
fn what_a_failed_write_did_not_take_leaves_first_the_next_time() {
    for faults in [Faults { failed_writes: 1, ..Faults::NONE }, Faults { room_bytes: 0, ..Faults::NONE }] {
        let memory = Memory::new(1, faults);
        let mut at = place(memory.medium(), config(100));
        (0..300).for_each(|index| at.write(index, &if index % 30 == 7 { noise(index, 1) } else { heap(index, 1) }));
        at.reclaim().unwrap_err();
        memory.set_faults(Faults::NONE);
        assert!(at.reclaim().unwrap() > 0);
        let stayed: Vec<u64> = (0..300).filter(|index| index % 30 == 7 && !at.is_out(*index)).collect();
        assert!(stayed.is_empty(), "{stayed:?} do not compress, and others have left");
    }
}

#[test]
fn what_is_old_leaves_first_also_after_many_failed_writes() {
    let memory = Memory::new(1, Faults { room_bytes: 0, ..Faults::NONE });
    let mut at = place(memory.medium(), config(100));
    (1000..2000).for_each(|index| at.write(index, &heap(index, 1)));
    pass_ages(&at.store, 5);
    (0..1000).for_each(|index| at.write(index, &heap(index, 1)));
    at.store.set_limit_bytes(at.store.mem_used_total_bytes());
    for _ in 0..20 {
        at.store.reclaim(&mut at.worker, &at.backing).unwrap_err();
    }
    memory.set_faults(Faults::NONE);
    while !at.store.reclaim(&mut at.worker, &at.backing).unwrap().finished {}
    let young = (0..1000).filter(|index| at.is_out(*index)).count();
    let old = (1000..2000).filter(|index| at.is_out(*index)).count();
    assert!(young == 0 && old > 300, "{young} young pages and {old} old ones have left");
}
