use super::*;

const WHOLE: u64 = 1 << 20;

fn segments(count: u32) -> Segments {
    Segments::new(count, WHOLE, 1).unwrap()
}

fn written(segments: &mut Segments, live: u32) -> Begun {
    let begun = segments.begin(0).unwrap();
    segments.arrived(begun, live);
    segments.settled(begun);
    begun
}

fn chosen(segments: &mut Segments, room: u64) -> Option<u32> {
    segments.choose(room).map(|begun| begun.segment)
}

#[test]
fn nothing_begins_after_the_last_flight() {
    let mut segments = Segments::new(4, WHOLE, 1).unwrap();
    segments.end_after(1);
    assert_eq!(segments.begin(0).unwrap().flight, 1);
    assert!(segments.is_out_of_flights() && segments.begin(0).is_none(), "its number is another's");
}

#[test]
fn live_and_free_bytes_add_up_through_a_life() {
    let mut segments = segments(4);
    let first = written(&mut segments, 1000);
    let second = segments.begin(0).unwrap();
    assert_eq!((second.segment, second.flight), (1, 2));
    assert_eq!(segments.flight_of(1), None, "it is not there yet");
    assert_eq!(segments.stats().flying_bytes, WHOLE);
    segments.failed(second);
    assert_eq!(segments.stats().free_bytes, 3 * WHOLE);
    assert_eq!(segments.stats().dead_bytes, WHOLE - 1000);
    segments.free_record(first.segment, 400);
    assert_eq!((segments.stats().live_bytes, segments.flight_of(0)), (600, Some(1)));
    segments.free_record(first.segment, 600);
    let stats = segments.stats();
    assert_eq!([stats.live_bytes, stats.free_bytes, stats.dead_bytes, stats.flying_bytes], [0, 4 * WHOLE, 0, 0]);
    assert_eq!(segments.flight_of(0), None);
}

#[test]
fn room_that_is_taken_already_is_used_first_and_spares_are_kept() {
    let mut segments = segments(4);
    let [_, second, third] = [7, 7, 7].map(|live| written(&mut segments, live));
    [second, third].iter().for_each(|begun| _ = segments.free_record(begun.segment, 7));
    let again = segments.begin(1).unwrap();
    assert_eq!((again.segment, again.flight), (1, 4), "a flight's number is never used again");
    assert_eq!(segments.begin(1).unwrap().segment, 3, "the spare one is to have its room");
    assert!(segments.begin(1).is_none());
    assert_eq!(segments.begin(0).unwrap().segment, 2);
    assert!(segments.begin(0).is_none());
}

#[test]
fn what_is_cleaned_is_what_pays() {
    let mut segments = segments(200);
    let old_and_half = written(&mut segments, (WHOLE / 2) as u32);
    (0..80).for_each(|_| _ = written(&mut segments, WHOLE as u32));
    let young_and_a_fifth = written(&mut segments, (WHOLE / 5) as u32);
    (0..19).for_each(|_| _ = written(&mut segments, WHOLE as u32));
    assert_eq!(chosen(&mut segments, WHOLE / 4), Some(young_and_a_fifth.segment), "the other does not fit");
    assert_eq!(chosen(&mut segments, WHOLE), Some(old_and_half.segment));
    assert_eq!(chosen(&mut segments, WHOLE), None, "full ones are left alone, and so are those that are being cleaned");
    segments.cleaned();
    assert_eq!(chosen(&mut segments, WHOLE), Some(old_and_half.segment));
    segments.stick(Begun { flight: old_and_half.flight - 1, ..old_and_half });
    segments.cleaned();
    assert_eq!(chosen(&mut segments, WHOLE), Some(old_and_half.segment), "it is another flight's now");
    segments.stick(old_and_half);
    segments.cleaned();
    assert_eq!(chosen(&mut segments, WHOLE), Some(young_and_a_fifth.segment), "what is stuck stays so");
}

#[test]
fn what_could_not_be_emptied_or_read_is_tried_again_when_there_is_no_other() {
    let mut segments = segments(8);
    let [best, second, third] = [1000, 2000, 3000].map(|live| written(&mut segments, live));
    assert_eq!(chosen(&mut segments, WHOLE), Some(best.segment));
    assert!(segments.stick(best), "others are worth a try");
    // A record that its slot did not name any more when it was looked for.
    segments.free_record(best.segment, 10);
    for (begun, is_next) in [(second, 1), (third, 2)] {
        assert_eq!(chosen(&mut segments, WHOLE), Some(is_next));
        segments.put_off(begun);
        segments.cleaned();
    }
    assert_eq!(chosen(&mut segments, WHOLE), Some(best.segment), "something has died there");
    assert!(!segments.stick(best), "one that is tried again is enough");
    segments.cleaned();
    // Those that could not be read take turns, however much there is to gain.
    for _ in 0..3 {
        let turn = [(); 2].map(|()| {
            let begun = segments.choose(WHOLE).unwrap();
            segments.put_off(begun);
            segments.cleaned();
            begun.segment
        });
        assert_eq!(turn, [second.segment, third.segment]);
    }
}

#[test]
fn where_a_write_failed_is_written_last_and_each_such_place_in_its_turn() {
    let mut segments = segments(4);
    let fail = |segments: &mut Segments, spare| {
        let begun = segments.begin(spare).unwrap();
        segments.failed(begun);
        begun.segment
    };
    assert_eq!([fail(&mut segments, 1), fail(&mut segments, 1)], [0, 1]);
    assert_eq!((segments.sure(), segments.free), (2, 4));
    let third = written(&mut segments, 7);
    assert_eq!(third.segment, 2);
    assert_eq!(segments.begin(3).map(|begun| begun.segment), None, "spares are kept");
    // The last that is sure is the one to spare.
    assert_eq!([(); 4].map(|()| fail(&mut segments, 1)), [0, 1, 0, 1]);
    assert_eq!(segments.begin(0).unwrap().segment, 3);
    assert_eq!(written(&mut segments, 7).segment, 0);
    segments.free_record(0, 7);
    assert_eq!((segments.sure(), segments.begin(0).unwrap().segment), (1, 0), "it is good again");
    assert_eq!(segments.stats().free_bytes, WHOLE);
}

#[test]
fn a_medium_that_failed_for_a_while_has_no_bad_places() {
    let mut segments = segments(40);
    for _ in 0..20 {
        let begun = segments.begin(1).unwrap();
        segments.failed(begun);
    }
    assert_eq!(segments.sure(), 20);
    let next = written(&mut segments, 7);
    assert_eq!((next.segment, segments.sure(), segments.begin(1).unwrap().segment), (20, 39, 0));
}

#[test]
fn a_hole_for_which_there_is_no_room_is_taken_after_what_has_its_room() {
    let mut segments = segments(4);
    let [_, hole, whole, _] = [7; 4].map(|live| written(&mut segments, live));
    segments.free_record(hole.segment, 7);
    let punched = segments.next_to_punch(0).unwrap();
    segments.punched(punched);
    let begun = segments.begin(0).unwrap();
    assert_eq!(begun.segment, hole.segment);
    segments.give_back(begun);
    segments.free_record(whole.segment, 7);
    assert_eq!(segments.begin(0).unwrap().segment, whole.segment);
    assert_eq!(segments.begin(0).unwrap().segment, hole.segment);
}

#[test]
fn what_is_not_settled_is_not_cleaned() {
    let mut segments = segments(4);
    let begun = segments.begin(0).unwrap();
    segments.arrived(begun, 1000);
    assert_eq!(chosen(&mut segments, WHOLE), None);
    segments.settled(begun);
    assert_eq!(chosen(&mut segments, WHOLE), Some(begun.segment));
    assert_eq!(segments.live_bytes_of(begun), Some(1000));
    segments.free_record(begun.segment, 1000);
    assert_eq!(segments.live_bytes_of(begun), None);
    let again = written(&mut segments, 500);
    assert_eq!((again.segment, segments.live_bytes_of(begun)), (begun.segment, None), "it is another flight's now");
}

#[test]
fn the_last_free_segments_are_punched_first() {
    let mut segments = segments(4);
    for begun in [1, 2, 3].map(|live| written(&mut segments, live)) {
        segments.free_record(begun.segment, 3);
    }
    let punched: Vec<u32> = core::iter::from_fn(|| {
        let begun = segments.next_to_punch(1)?;
        assert!(segments.stats().free_bytes < 4 * WHOLE, "it could be written to while it is punched");
        segments.punched(begun);
        Some(begun.segment)
    })
    .collect();
    assert_eq!(punched, [2, 1]);
    assert_eq!(segments.stats().free_bytes, 4 * WHOLE);
    assert_eq!(segments.begin(0).unwrap().segment, 0);
}

#[test]
fn what_takes_room_is_counted_and_the_last_of_it_found_whatever_happened() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut segments = segments(40);
    let mut full: Vec<Begun> = Vec::new();
    for _ in 0..20_000 {
        match random.u8(0..6) {
            0 | 1 => full.extend(segments.begin(1).inspect(|begun| segments.arrived(*begun, 9))),
            4 => segments.begin(1).into_iter().for_each(|begun| segments.failed(begun)),
            5 => segments.begin(1).into_iter().for_each(|begun| segments.give_back(begun)),
            2 if !full.is_empty() => {
                let begun = full.swap_remove(random.usize(..full.len()));
                segments.free_record(begun.segment, 9);
            }
            _ => {
                let is_filled = |segment: &Segment| matches!(segment.state, State::Free { filled: true, .. });
                let filled = segments.table.iter().filter(|segment| is_filled(segment)).count();
                let last = segments.table.iter().rposition(is_filled).filter(|_| filled > 3);
                let begun = segments.next_to_punch(3);
                assert_eq!(
                    (segments.filled, begun.map(|it| it.segment as usize)),
                    (filled - usize::from(last.is_some()), last)
                );
                begun.into_iter().for_each(|begun| segments.punched(begun));
            }
        }
        let free = |segment: &&Segment| matches!(segment.state, State::Free { .. });
        let sure = |segment: &&Segment| matches!(segment.state, State::Free { failed: false, .. });
        assert_eq!(segments.free, segments.table.iter().filter(free).count());
        assert_eq!(segments.sure(), segments.table.iter().filter(sure).count());
    }
    assert!(segments.flights() > 1000);
}

#[test]
fn a_copy_does_not_take_what_its_ancestor_filled_for_what_it_has_filled() {
    let mut segments = Segments::new(8, WHOLE, 2).unwrap();
    let first = written(&mut segments, 7);
    let spare = segments.next_to_fill(1).unwrap();
    segments.filled(spare, true);
    segments.free_record(first.segment, 7);
    assert_eq!(segments.filled, 2);
    // Nothing of it is alive: the copy writes to the same part, in a file of its own.
    segments.begin_part(8, 1 << 34);
    let is_filled = |segment: &&Segment| matches!(segment.state, State::Free { filled: true, .. });
    assert_eq!((segments.own(), segments.filled, segments.table.iter().filter(is_filled).count()), (0..8, 0, 0));
    (0..7).for_each(|_| _ = written(&mut segments, 7));
}

#[test]
fn two_flights_that_find_no_room_at_once_have_both_not_known_before() {
    let mut segments = segments(8);
    let [first, second] = [0; 2].map(|spare| segments.begin(spare).unwrap());
    segments.no_room(first);
    segments.no_room(second);
    assert!(!first.was_short && !second.was_short, "each may find something to clean");
    segments.is_short_no_more();
    assert!(!segments.begin(0).unwrap().was_short);
}
