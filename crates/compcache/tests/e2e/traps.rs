//! What is known to go wrong in a pager does not: each program in `tests/programs` walks into one trap and checks itself.
//!
//! Every test runs its program bare, and with each way of eviction; a working set of 16 MiB in 8 MiB. Status and output
//! must be those of the bare run. Under compcache the program fails if what it made cold did not leave
//! (`TRAP_EXPECT_EVICTION`). A program that lacks something here ends with 77, which is a skip.

use std::sync::{Mutex, PoisonError};

use compcache_testkit::features::{Feature, requires, skip};

use crate::support::{Cap, Cgroup, Outcome, Program, Way, beside_others, sample_until, scratch, trap_program, ways};

const LACKS: i32 = 77;
/// Half of the programs' working set: what they make cold leaves then, and with less some of them take minutes.
const CAP: Cap = Cap::Resident(8 << 20);

fn trap(name: &'static str) -> Program {
    Program::new(trap_program(name)).env("TRAP_MB", "16")
}

/// Whether this outcome is a skip. Printed and counted; with `COMPCACHE_REQUIRE_ALL=1` it is a failure.
fn is_skip(outcome: &Outcome) -> bool {
    let lacks = outcome.status.code() == Some(LACKS);
    if lacks {
        skip(&format!("a trap needs something: {}", outcome.stderr.trim_end()));
    }
    lacks
}

fn spring(name: &'static str, arguments: &[&str]) {
    spring_under(&CAP, &trap(name), name, arguments);
}

fn spring_under(cap: &Cap, program: &Program, name: &'static str, arguments: &[&str]) {
    let _shared = beside_others();
    let dir = scratch();
    let in_dir = |argument: &&str| argument.replace("DIR", &dir.path().display().to_string());
    let program = program.clone().args(arguments.iter().map(in_dir));
    let bare = program.bare();
    if is_skip(&bare) {
        return;
    }
    // With these it says that something was not as it should be; then it is of no use to compare.
    assert!(!matches!(bare.status.code(), Some(1 | 2)), "it fails without compcache: {}", bare.explain());
    for way in ways() {
        // Nothing may be learnt from one run by the next: files are made anew.
        let lets_devices_write = way == Way::Remap && name == "io_urings";
        let program = program.clone();
        let program = if lets_devices_write { program } else { program.env("TRAP_EXPECT_EVICTION", "1") };
        let changes_mappings = ["maps", "locks", "limits"].contains(&name);
        let paged = if changes_mappings { program.paged_again_if_ended(way, cap) } else { program.paged(way, cap) };
        eprintln!("{name} {arguments:?} {way:?}: {:.1} s, bare {:.1} s", paged.seconds, bare.seconds);
        paged.must_equal(&bare);
        if lets_devices_write {
            // A frame that moves by mremap is not asked whether a device writes to it.
            assert!(paged.stderr.contains("O_DIRECT or io_uring"), "nobody is told: {}", paged.explain());
        } else {
            paged.must_have_evicted();
        }
    }
}

macro_rules! traps {
    ($($(#[$attribute:meta])* $sentence:ident: $program:literal $arguments:expr;)*) => {
        $(
            #[test]
            $(#[$attribute])*
            fn $sentence() {
                spring($program, &$arguments);
            }
        )*

        /// Every trap: its program and its arguments.
        const TRAPS: &[(&str, &[&str])] = &[$(($program, &$arguments)),*];
    };
}

traps! {
    closefrom_does_not_empty_the_memory: "closes_descriptors" ["closefrom"];
    close_range_does_not_empty_the_memory: "closes_descriptors" ["close_range"];
    close_range_with_unshare_does_not_empty_the_memory: "closes_descriptors" ["unshare"];
    closing_every_number_does_not_empty_the_memory: "closes_descriptors" ["loop"];
    closing_even_the_standard_descriptors_does_not_empty_the_memory: "closes_descriptors" ["all"];
    laying_other_files_over_all_descriptors_does_not_empty_the_memory: "closes_descriptors" ["dup2"];

    threads_go_on_when_the_main_thread_ends: "main_thread_ends" [];
    threads_that_come_and_go_are_joined: "thread_churn" ["churn"];
    threads_whose_stacks_are_cold_are_joined: "thread_churn" ["cold"];
    threads_on_stacks_of_the_programs_own_are_joined: "thread_churn" ["own_stacks"];
    control_blocks_stay_after_very_many_threads: "thread_churn" ["very_many"];
    a_thread_may_unmap_where_its_handle_was_written_to: "thread_churn" ["handles"];
    detached_threads_leave_nothing_behind: "thread_churn" ["detached"];

    both_sides_of_a_fork_go_on: "forks" ["both_sides"];
    several_children_at_once_have_right_memory: "forks" ["many"];
    a_fork_while_other_threads_write_has_right_memory: "forks" ["from_thread"];
    children_of_children_have_right_memory: "forks" ["nested"];
    fork_and_exec_in_a_loop_does_no_harm: "forks" ["exec_loop"];
    a_child_outlives_a_parent_that_was_killed: "forks" ["outlives"];
    a_fork_with_threads_made_behind_our_back_has_right_memory: "forks" ["hidden"];
    a_fork_with_threads_that_have_many_keys_has_right_memory: "forks" ["keys"];
    a_fork_while_a_stream_is_closed_goes_on: "forks" ["streams"];
    a_fork_with_a_stream_across_two_pages_has_right_memory: "forks" ["straddling"];
    a_fork_with_much_thread_local_memory_has_right_memory: "forks" ["thread_local"];

    vfork_and_exec_read_their_arguments_from_cold_memory: "spawns" ["vfork"];
    fork_and_exec_read_their_arguments_from_cold_memory: "spawns" ["fork"];
    posix_spawn_reads_its_arguments_from_cold_memory: "spawns" ["posix_spawn"];
    system_and_popen_work: "spawns" ["system"];

    a_raw_clone_has_right_memory: "raw_forks" ["clone"];
    a_raw_clone3_has_right_memory: "raw_forks" ["clone3"];
    a_raw_fork_has_right_memory: "raw_forks" ["fork"];
    fork_without_handlers_has_right_memory: "raw_forks" ["_Fork"];
    the_clone_function_has_right_memory: "raw_forks" ["clone_function"];
    a_fork_past_libc_has_right_memory: "raw_forks" ["past_libc"];
    a_fork_past_libc_that_changes_its_memory_at_once_has_the_rest: "raw_forks" ["changes"];

    memory_that_is_unmapped_does_not_come_back: "maps" ["munmap"];
    memory_that_is_moved_goes_along: "maps" ["mremap"];
    memory_that_is_moved_and_cut_off_leaves_its_neighbour_alone: "maps" ["shortens"];
    memory_that_is_moved_to_and_fro_goes_along: "maps" ["to_and_fro"];
    a_mapping_laid_over_cold_memory_is_new: "maps" ["fixed"];
    thousands_of_small_regions_are_paged_rightly: "maps" ["many_regions"];
    a_copy_has_right_memory_above_very_many_mappings: "maps" ["islands"];
    memory_right_above_a_file_is_paged: "maps" ["above_file"];
    a_program_may_use_mremap_dontunmap_itself: "maps" ["dontunmap"];

    what_is_discarded_reads_as_zeroes: "discards" ["dontneed"];
    what_is_discarded_while_others_evict_reads_as_zeroes: "discards" ["racing"];
    what_is_freed_is_old_or_zero_and_then_what_is_written: "discards" ["free"];
    the_heap_that_shrank_grows_with_zeroes: "discards" ["brk"];
    wipe_on_fork_wipes_cold_memory: "discards" ["wipeonfork"];
    dont_fork_keeps_cold_memory_from_the_child: "discards" ["dontfork"];
    guard_pages_discard_cold_memory: "discards" ["guard"];
    guard_pages_that_are_refused_discard_nothing: "discards" ["guard_errors"];
    guard_pages_stay_while_memory_beside_them_is_filled: "discards" ["guard_stream"];
    advice_changes_no_contents: "discards" ["advice"];

    a_write_to_cold_read_only_memory_is_a_fault_of_the_programs: "protects" ["readonly"];
    memory_without_access_keeps_its_contents: "protects" ["none"];
    memory_that_may_be_executed_leaves_and_is_run: "protects" ["code"];
    memory_that_may_be_executed_may_be_refused_from_now_on: "protects" ["refused"];
    memory_that_may_be_executed_may_lie_beside_locked_memory: "protects" ["beside"];
    protections_may_change_at_any_time: "protects" ["toggles"];

    locked_memory_stays: "locks" ["mlock"];
    memory_locked_on_fault_stays: "locks" ["onfault"];
    locking_all_memory_loses_none: "locks" ["mlockall"];
    locked_memory_grows_and_moves: "locks" ["growing"];
    locking_all_memory_while_others_change_the_map_ends: "locks" ["unmapping"];

    huge_pages_are_paged_rightly: "huge_pages" [];

    deep_recursion_finds_its_way_back: "stacks" ["recursion"];
    signals_are_taken_on_a_cold_stack: "stacks" ["sigaltstack"];
    coroutines_run_on_cold_stacks: "stacks" ["coroutines"];

    files_are_read_and_written_through_cold_buffers: "syscalls" ["files", "DIR"];
    sockets_are_read_and_written_through_cold_buffers: "syscalls" ["sockets", "DIR"];
    pipes_are_read_and_written_through_cold_buffers: "syscalls" ["pipes", "DIR"];
    waiting_calls_find_their_cold_lists: "syscalls" ["waiting", "DIR"];
    paths_in_cold_memory_are_found: "syscalls" ["paths", "DIR"];
    other_calls_find_their_cold_arguments: "syscalls" ["memory", "DIR"];
    direct_io_in_flight_reaches_the_right_pages: "direct_io" ["DIR"];
    io_uring_reads_and_writes_cold_memory: "io_urings" ["plain", "DIR"];
    io_uring_keeps_registered_buffers: "io_urings" ["registered", "DIR"];

    futexes_in_cold_memory_wake_their_waiters: "futexes" ["cold"];
    mutexes_in_cold_memory_exclude: "futexes" ["mutexes"];
    shared_futexes_wake_another_process: "futexes" ["shared"];
    a_cold_robust_mutex_survives_its_owner: "futexes" ["robust"];
    a_cold_mutex_that_inherits_priorities_is_taken: "futexes" ["inherits"];
    the_end_of_a_bare_thread_is_told_in_cold_memory: "futexes" ["ends"];

    a_debugger_reads_cold_memory_of_a_stopped_thread: "readers" ["peekdata"];
    another_process_reads_and_writes_cold_memory: "readers" ["vm_readv"];
    the_memory_file_of_a_process_shows_cold_memory: "readers" ["proc_mem"];
    cold_memory_of_a_stopped_process_is_read_when_it_goes_on: "readers" ["stopped"];
    a_process_that_is_stopped_and_continued_goes_on: "readers" ["continued"];

    threads_go_on_after_their_process_changed_its_user: "changes_user" ["threads"];
    a_process_that_changed_its_user_can_fork: "changes_user" ["forks"];
    a_process_that_changed_its_user_can_fork_twice: "changes_user" ["again"];
    a_process_that_may_make_no_thread_can_fork_on_a_cold_stack: "changes_user" ["last"];

    exit_passes_its_status: "ends" ["exit"];
    exit_without_handlers_passes_its_status: "ends" ["_exit"];
    return_from_main_passes_its_status: "ends" ["return"];
    quick_exit_passes_its_status: "ends" ["quick_exit"];
    exit_handlers_find_their_memory: "ends" ["atexit"];
    exit_from_a_thread_passes_its_status: "ends" ["thread_exit"];
    the_end_of_the_last_thread_ends_the_process: "ends" ["last_thread"];
    the_end_of_the_only_thread_past_libc_ends_the_process: "ends" ["past_libc"];
    abort_kills_by_its_signal: "ends" ["abort"];
    a_killed_program_is_gone: "ends" ["kill"];
    a_terminated_program_is_gone: "ends" ["term"];
    a_bad_access_kills_by_its_signal: "ends" ["segv"];
    a_bad_instruction_kills_by_its_signal: "ends" ["trap"];
    a_handler_of_termination_finds_its_memory: "ends" ["handled_term"];
    a_parent_goes_on_when_its_children_are_killed: "ends" ["in_child"];

    a_crash_handler_finds_its_memory: "crash_handler" ["handler"];
    a_crash_handlers_helper_reads_the_crashed_memory: "crash_handler" ["helper"];

    idle_memory_is_right_afterwards: "idles" ["1"];

    a_program_replaces_itself_again_and_again: "execs_itself" ["main"];
    a_program_is_replaced_from_a_thread: "execs_itself" ["thread"];

    a_limit_on_address_space_does_not_stop_the_pager: "limits" ["as"];
    a_limit_on_data_does_not_stop_the_pager: "limits" ["data"];
    a_limit_on_data_that_leaves_no_room_for_tables_does_not_stop_the_pager: "limits" ["scattered"];
    a_limit_on_descriptors_does_not_stop_the_pager: "limits" ["files"];
    a_limit_on_locked_memory_does_not_stop_the_pager: "limits" ["memlock"];
    a_limit_on_processes_does_not_stop_the_pager: "limits" ["processes"];
    a_system_call_filter_on_a_thread_does_not_stop_the_pager: "limits" ["seccomp"];
    a_system_call_filter_is_set_on_a_small_stack: "limits" ["small_stacks"];
    a_system_call_filter_on_all_threads_does_not_stop_the_pager: "limits" ["tsync"];
    a_system_call_filter_that_forbids_paging_leaves_memory_right: "limits" ["tsync_forbids"];
    strict_seccomp_does_not_stop_the_pager: "limits" ["strict"];

    what_takes_a_single_thread_is_allowed: "namespaces" ["alone"];
    what_takes_a_single_thread_is_refused_to_two: "namespaces" ["threads"];
    all_other_namespaces_can_be_made_and_left: "namespaces" ["others"];
    a_child_in_a_user_namespace_of_its_own_works: "namespaces" ["sandbox"];

    shared_memory_stays_shared: "shares" ["anonymous"];
    a_memory_file_keeps_its_contents: "shares" ["memfd"];
    a_private_file_mapping_keeps_its_changes: "shares" ["private", "DIR"];
    a_second_process_in_the_same_space_is_served: "shares" ["vm_clone"];

    no_write_is_lost_between_threads: "races" ["counters"];
    no_atomic_addition_is_lost: "races" ["atomics"];
    writes_are_seen_in_their_order: "races" ["ordering"];

    pages_lent_to_a_pipe_keep_their_contents: "lends" ["vmsplice"];
    what_is_written_to_pages_lent_to_a_pipe_is_read_from_it: "lends" ["written"];
    pages_lent_where_others_were_a_moment_ago_do_not_leave: "lends" ["again"];
    pages_lent_to_a_socket_keep_their_contents: "lends" ["zerocopy"];
    pages_lent_by_a_list_that_is_not_there_are_an_error: "lends" ["nowhere"];

    a_program_sees_nothing_of_the_pager: "shows_nothing" [];
    a_program_may_have_a_userfaultfd_of_its_own: "own_userfaultfd" [];
    static_memory_is_right: "static_data" [];
}

/// Not where pages leave by mremap ([S43]).
#[test]
fn guards_of_libcs_own_stay_while_memory_beside_them_is_filled() {
    let _shared = beside_others();
    for way in ways().into_iter().filter(|way| *way == Way::Move) {
        let outcome = trap("discards").args(["guard_past_libc"]).env("TRAP_EXPECT_EVICTION", "1").paged(way, &CAP);
        if !is_skip(&outcome) {
            assert!(outcome.status.success(), "{}", outcome.explain());
            outcome.must_have_evicted();
        }
    }
}

/// Where the kernel takes it just then, it must not be missed on its way out.
#[test]
fn what_is_freed_is_old_or_zero_while_the_kernel_takes_it() {
    if !requires(&[Feature::Root, Feature::CgroupMemory]) {
        return;
    }
    let _shared = beside_others();
    for way in ways() {
        let group = Cgroup::new(1 << 30);
        let program = trap("discards").args(["reclaimed".as_ref(), group.path().as_os_str()]);
        let outcome = program.env("TRAP_EXPECT_EVICTION", "1").paged(way, &CAP);
        if !is_skip(&outcome) {
            assert!(outcome.status.success(), "{way:?}: {}", outcome.explain());
            outcome.must_have_evicted();
        }
    }
}

/// What is copied by a function of libc's is paged again; what is copied past it is not, and counted.
#[test]
fn a_copy_that_libc_makes_is_paged() {
    let _shared = beside_others();
    for (how, unpaged) in
        [("clone", 0), ("clone3", 0), ("fork", 0), ("_Fork", 0), ("clone_function", 0), ("past_libc", 3)]
    {
        for way in ways() {
            let outcome = trap("raw_forks").args([how]).paged(way, &CAP);
            if is_skip(&outcome) {
                continue;
            }
            assert!(outcome.status.success(), "{how} {way:?}: {}", outcome.explain());
            assert_eq!(outcome.stat("unpaged_copies"), unpaged, "{how} {way:?}: {}", outcome.explain());
        }
    }
}

/// Under so much several groups of frames are filled at once, and pieces are smaller than that.
#[test]
fn memory_that_may_be_executed_may_lie_in_the_midst_of_other() {
    let program = trap("protects").env("TRAP_MB", "96");
    spring_under(&Cap::Resident(64 << 20), &program, "protects", &["mixed"]);
}

#[test]
fn a_daemon_goes_on_when_all_its_parents_are_gone() {
    let _shared = beside_others();
    let mut all = vec![Way::Bare];
    all.extend(ways());
    for way in all {
        let dir = scratch();
        let verdict = dir.path().join("verdict");
        let mut program = trap("daemonises").args([&verdict]);
        if way != Way::Bare {
            program = program.env("TRAP_EXPECT_EVICTION", "1");
        }
        let mut running = program.start(way, &CAP);
        running.await_end();
        let said = sample_until("the daemon's verdict is there", 30, || std::fs::read_to_string(&verdict).ok());
        assert_eq!(said, "right\n", "{way:?}: {}", running.stderr_so_far());
    }
}

/// Its program, without compcache, fails for a byte that it damages itself.
fn must_notice_a_planted_byte(name: &'static str, arguments: &[&str]) {
    let dir = scratch();
    // What closes even standard error cannot say why.
    let silent = arguments.contains(&"all");
    let arguments = arguments.iter().map(|argument| argument.replace("DIR", &dir.path().display().to_string()));
    let program = trap(name).args(arguments).env("TRAP_MB", "8").env("TRAP_PLANT", "1");
    let outcome = program.bare();
    if is_skip(&outcome) {
        return;
    }
    assert!(!outcome.status.success(), "a wrong byte went unnoticed: {}", outcome.explain());
    assert!(silent || outcome.stderr.contains("WRONG BYTES"), "it failed for another reason: {}", outcome.explain());
}

#[test]
fn every_trap_notices_a_planted_wrong_byte() {
    let _shared = beside_others();
    let measured: &[(&str, &[&str])] =
        &[("holds", &["4", "0"]), ("grows", &["4", "0", "256"]), ("twins", &["4"]), ("fills", &["1", "1", "1"])];
    let left = Mutex::new(TRAPS.iter().chain(measured));
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    // Most of them wait most of the time.
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while let Some((name, arguments)) = next() {
                    must_notice_a_planted_byte(name, arguments);
                }
            });
        }
    });
}
