/*
 * The address space changes under the pager's hands, without a pause:
 *
 *   munmap        maps, fills, unmaps all or the middle, maps again at the same place: new memory must be zero
 *   mremap        grows, shrinks and moves: contents go along, what was cut off does not come back
 *   fixed         new mappings laid over evicted ones with MAP_FIXED
 *   many_regions  thousands of small regions that differ in protection
 *   islands       more mappings than a list has room for, below memory that a copy of the process has
 *   islands_known the same, of memory that the pager knew before it fell apart: by hand, it takes a minute
 *   above_file    an area that lies right above a mapping of a file, before anything was evicted
 *   dontunmap     the program itself uses MREMAP_DONTUNMAP, as garbage collectors do
 *   shortens      moves and shortens an evicted area with one call, to right before another
 *   to_and_fro    one thread moves two evicted areas to and fro, into each other's holes, without a look at them
 */
#include "trap.h"
#include <sched.h>

enum { THREADS = 3, SLOT_PAGES = 512 };
static double until;
static atomic_bool stop;

static void *walk_for_ever(void *unused)
{
	(void)unused;
	while (!atomic_load(&stop)) filler_walk();
	return NULL;
}

static void *map_at(void *at, size_t pages)
{
	void *got = mmap(at, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0), -1, 0);
	MUST(got != MAP_FAILED);
	return got;
}

static void *unmaps(void *argument)
{
	uint64_t tag = (uintptr_t)argument, round = 0;
	/* Reserved with PROT_NONE, so that other threads' mappings do not land in the holes. */
	unsigned char *home = mmap(NULL, SLOT_PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	MUST(home != MAP_FAILED);
	while (seconds_now() < until) {
		uint64_t random = mix(tag << 32 | round++);
		map_at(home, SLOT_PAGES);
		must_be_zero(home, SLOT_PAGES * PAGE, "just mapped over an older mapping");
		struct area area = area_over(home, SLOT_PAGES * PAGE, tag);
		area_fill(&area, round);
		if (random % 3 == 0) sleep_ms(3);
		size_t from = (random >> 8) % SLOT_PAGES, count = 1 + (random >> 24) % (SLOT_PAGES - from);
		for (size_t page = from; page < from + count; page++) page_check(home + page * PAGE, tag, page, round);
		MUST(munmap(home + from * PAGE, count * PAGE) == 0);
		map_at(home + from * PAGE, count);
		must_be_zero(home + from * PAGE, count * PAGE, "unmapped and mapped again");
		for (size_t page = 0; page < SLOT_PAGES; page++)
			if (page < from || page >= from + count) page_check(home + page * PAGE, tag, page, round);
		/* PROT_NONE again: the whole slot loses its contents. */
		MUST(mmap(home, SLOT_PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == home);
	}
	return NULL;
}

/*
 * mremap. A mapping that has just come may be registered in part for an instant, and is refused then; in rare cases for
 * good, and a program that must move it has to copy it: [S37].
 */
static void *remap(void *at, size_t old, size_t new, int flags, void *target)
{
	static atomic_int for_good;
	for (int tries = 0; tries < 100; tries++) {
		void *to = mremap(at, old, new, flags, target);
		if (to != MAP_FAILED || errno != EFAULT) return to;
		sleep_ms(1);
	}
	if (atomic_fetch_add(&for_good, 1) == 2) die("mremap: refused for good (EFAULT), three times");
	void *to = map_at(target, new / PAGE);
	memcpy(to, at, old < new ? old : new);
	MUST(munmap(at, old) == 0);
	return to;
}

static void *moves(void *argument)
{
	uint64_t tag = (uintptr_t)argument, round = 0;
	while (seconds_now() < until) {
		uint64_t random = mix(tag << 32 | round++);
		size_t pages = 64 + random % SLOT_PAGES, other = 64 + (random >> 20) % SLOT_PAGES;
		unsigned char *at = map_at(NULL, pages);
		struct area area = area_over(at, pages * PAGE, tag);
		area_fill(&area, round);
		if (random >> 60 == 0) push_out(at, pages);
		unsigned char *to = MAP_FAILED;
		switch ((random >> 40) % 3) {
		case 0:
			to = remap(at, pages * PAGE, other * PAGE, MREMAP_MAYMOVE, NULL);
			break;
		case 1: {
			/* Onto another mapping, whose contents are lost. */
			unsigned char *target = map_at(NULL, other);
			memset(target, 0x77, other * PAGE);
			to = remap(at, pages * PAGE, other * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target);
			MUST(to == target);
			break;
		}
		default: {
			/* The middle moves out, the two ends stay. */
			size_t third = pages / 3;
			unsigned char *target = map_at(NULL, third);
			to = remap(at + third * PAGE, third * PAGE, third * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target);
			MUST(to == target);
			for (size_t page = 0; page < third; page++) page_check(to + page * PAGE, tag, page + third, round);
			for (size_t page = 0; page < third; page++) page_check(at + page * PAGE, tag, page, round);
			for (size_t page = 2 * third; page < pages; page++) page_check(at + page * PAGE, tag, page, round);
			MUST(munmap(to, third * PAGE) == 0);
			MUST(munmap(at, third * PAGE) == 0);
			MUST(munmap(at + 2 * third * PAGE, (pages - 2 * third) * PAGE) == 0);
			continue;
		}
		}
		MUST(to != MAP_FAILED);
		for (size_t page = 0; page < pages && page < other; page++) page_check(to + page * PAGE, tag, page, round);
		if (other > pages) must_be_zero(to + pages * PAGE, (other - pages) * PAGE, "the part that mremap added");
		if (other < pages) {
			unsigned char *again = remap(to, other * PAGE, pages * PAGE, MREMAP_MAYMOVE, NULL);
			MUST(again != MAP_FAILED);
			must_be_zero(again + other * PAGE, (pages - other) * PAGE, "shrunk and grown again");
			for (size_t page = 0; page < other; page++) page_check(again + page * PAGE, tag, page, round);
			MUST(munmap(again, pages * PAGE) == 0);
		} else {
			MUST(munmap(to, other * PAGE) == 0);
		}
	}
	return NULL;
}

static void *overlays(void *argument)
{
	uint64_t tag = (uintptr_t)argument, round = 0;
	static _Atomic uint64_t generations;
	uint64_t known[SLOT_PAGES] = {0};
	unsigned char *home = map_at(NULL, SLOT_PAGES);
	while (seconds_now() < until) {
		uint64_t random = mix(tag << 32 | round++);
		size_t from = random % SLOT_PAGES, count = 1 + (random >> 20) % (SLOT_PAGES - from);
		uint64_t generation = 1 + atomic_fetch_add(&generations, 1);
		if (random >> 61 == 0) sleep_ms(2);
		if (random >> 50 & 1) {
			map_at(home + from * PAGE, count);
			for (size_t page = from; page < from + count; page++) known[page] = 0;
		} else {
			for (size_t page = from; page < from + count; page++) {
				page_write(home + page * PAGE, tag, page, generation);
				known[page] = generation;
			}
		}
		for (size_t page = 0; page < SLOT_PAGES; page++) {
			if (known[page]) page_check(home + page * PAGE, tag, page, known[page]);
			else must_be_zero(home + page * PAGE, PAGE, "a new mapping laid over an old one");
		}
	}
	return NULL;
}

static void many_regions(void)
{
	size_t pages = working_set() / 2 / PAGE / 8 * 8;
	struct area area = area_new(pages * PAGE, 9, 1);
	for (size_t page = 0; page < pages; page += 8) MUST(mprotect(area.at + page * PAGE, 4 * PAGE, PROT_READ) == 0);
	/* Read-only memory need not leave (UFFDIO_MOVE refuses it): no more than a walk is asked for. */
	filler_walk();
	filler_walk();
	area_check(&area, 1);
	for (size_t page = 4; page < pages; page += 8)
		for (size_t i = page; i < page + 4; i++) page_write(area.at + i * PAGE, 9, i, 2);
	filler_walk();
	filler_walk();
	for (size_t page = 0; page < pages; page++) page_check(area.at + page * PAGE, 9, page, page % 8 < 4 ? 1 : 2);
	MUST(mprotect(area.at, pages * PAGE, PROT_READ | PROT_WRITE) == 0);
	area_fill(&area, 3);
	area_push_out(&area);
	area_check(&area, 3);
}

static void islands(bool known)
{
	enum { ISLANDS = 17000 };
	/* What comes after the islands presses for nothing: this is more than may stay. */
	struct area area = area_new(working_set(), 44, 1);
	/* Mappings come one below the other. */
	unsigned char *sea = map_at(NULL, 2 * ISLANDS);
	MUST(sea < area.at);
	/* Whether the pager knows of it before it falls apart. */
	for (size_t i = 0; known && i < 64; i++) page_write(sea + i * PAGE, 46, i, 1);
	if (known) push_out(sea, 64);
	for (size_t i = 0; i < ISLANDS; i++) MUST(munmap(sea + 2 * i * PAGE, PAGE) == 0);
	area_push_out(&area);
	pid_t child = fork();
	MUST(child >= 0);
	if (child == 0) {
		area_check(&area, 1);
		/* It goes on as any process, with memory of both kinds. */
		for (size_t i = 0; known && i < ISLANDS; i++) page_write(sea + (2 * i + 1) * PAGE, 45, i, 1);
		area_push_out(&area);
		for (size_t i = 0; known && i < ISLANDS; i++) page_check(sea + (2 * i + 1) * PAGE, 45, i, 1);
		area_check(&area, 1);
		_exit(0);
	}
	must_succeed(child);
	area_check(&area, 1);
	MUST(munmap(area.at, area.pages * PAGE) == 0 && munmap(sea, 2 * ISLANDS * PAGE) == 0);
}

static void above_file(void)
{
	size_t bytes = working_set() / 4;
	unsigned char *at = map_private(PAGE + bytes);
	int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	MUST(fd >= 0 && mmap(at, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == at);
	struct area area = area_over(at + PAGE, bytes, 47);
	area_fill(&area, 1);
	area_push_out(&area);
	area_check(&area, 1);
}

static void dontunmap(void)
{
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
	for (uint64_t round = 0; round < 6; round++) {
		struct area area = area_new(8 * MIB, 10, round);
		area_push_out(&area);
		unsigned char *to = mremap(area.at, 8 * MIB, 8 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
		if (to == MAP_FAILED) lacks("MREMAP_DONTUNMAP");
		must_be_zero(area.at, 8 * MIB, "what MREMAP_DONTUNMAP left behind");
		struct area moved = area_over(to, 8 * MIB, 10);
		area_check(&moved, round);
		area_fill(&area, round + 50);
		area_push_out(&moved);
		area_check(&area, round + 50);
		area_check(&moved, round);
		MUST(munmap(to, 8 * MIB) == 0 && munmap(area.at, 8 * MIB) == 0);
	}
}

static void to_and_fro(void)
{
	cpu_set_t one;
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	enum { PAGES = 256, LEN = PAGES * PAGE };
	struct area first = area_new(LEN, 40, 1), second = area_new(LEN, 41, 1);
	/* Nothing is mapped from here on that could take the hole. */
	filler_walk();
	unsigned char *hole = map_at(NULL, PAGES);
	MUST(munmap(hole, LEN) == 0);
	for (int round = 0; round < 40; round++) {
		area_push_out(&first);
		area_push_out(&second);
		/* The pager's threads wait for the same processor: several events are read at once. */
		if (round % 2) sched_setaffinity(0, sizeof(one), &one);
		for (int turn = 0; turn < 2 + round % 3; turn++) {
			int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
			MUST(remap(first.at, LEN, LEN, flags, hole) == hole);
			MUST(remap(second.at, LEN, LEN, flags, first.at) == first.at);
			MUST(remap(hole, LEN, LEN, flags, second.at) == second.at);
			unsigned char *at = first.at;
			first.at = second.at, second.at = at;
		}
		area_check(&first, 1);
		area_check(&second, 1);
	}
}

static void shortens(void)
{
	enum { PAGES = 256, LEN = PAGES * PAGE };
	for (uint64_t round = 0; round < 6; round++) {
		struct area moves = area_new(2 * LEN, 42, round);
		unsigned char *hole = map_at(NULL, 2 * PAGES);
		struct area beside = area_over(hole + LEN, LEN, 43);
		filler_walk();
		MUST(munmap(hole, LEN) == 0);
		area_fill(&beside, round);
		area_push_out(&moves);
		area_push_out(&beside);
		MUST(remap(moves.at, 2 * LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, hole) == hole);
		struct area cut = area_over(hole, LEN, 42);
		area_check(&beside, round);
		area_check(&cut, round);
		area_push_out(&cut);
		must_be_zero(map_at(moves.at, 2 * PAGES), 2 * LEN, "where memory was moved from");
		area_check(&beside, round);
		area_check(&cut, round);
		MUST(munmap(moves.at, 2 * LEN) == 0 && munmap(hole, 2 * LEN) == 0);
	}
}

static void with_threads(void *(*work)(void *))
{
	pthread_t threads[THREADS], walker;
	until = seconds_now() + 2;
	filler_walk();
	MUST(pthread_create(&walker, NULL, walk_for_ever, NULL) == 0);
	for (uintptr_t i = 0; i < THREADS; i++) MUST(pthread_create(&threads[i], NULL, work, (void *)(i + 20)) == 0);
	for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
	atomic_store(&stop, true);
	pthread_join(walker, NULL);
}

int main(int argc, char **argv)
{
	struct area kept = area_new(working_set() / 4, 8, 1);
	if (mode_is(argc, argv, "munmap")) with_threads(unmaps);
	else if (mode_is(argc, argv, "mremap")) with_threads(moves);
	else if (mode_is(argc, argv, "fixed")) with_threads(overlays);
	else if (mode_is(argc, argv, "many_regions")) many_regions();
	else if (mode_is(argc, argv, "islands")) islands(false);
	else if (mode_is(argc, argv, "islands_known")) islands(true);
	else if (mode_is(argc, argv, "above_file")) above_file();
	else if (mode_is(argc, argv, "dontunmap")) dontunmap();
	else if (mode_is(argc, argv, "to_and_fro")) to_and_fro();
	else if (mode_is(argc, argv, "shortens")) shortens();
	else die("munmap | mremap | fixed | many_regions | islands | islands_known | above_file | dontunmap | shortens | to_and_fro");
	area_check(&kept, 1);
	return passed();
}
