/*
 * Locks that lie in evicted memory.
 *
 *   cold      pairs of threads wake each other through futexes that get cold between two uses
 *   mutexes   ordinary mutexes and condition variables, one to a page, over an evicted array
 *   shared    the same between two processes, in shared memory that points into private memory
 *   robust    the owner of a robust mutex dies: the kernel writes to the evicted mutex and must wake the next one
 *   inherits  the kernel takes a mutex that inherits priorities, which it does not wait for
 *   ends      a thread of clone(2)'s ends, and the kernel clears the word that others wait for
 */
#include "trap.h"
#include <linux/futex.h>

enum { PAIRS = 8 };

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
	struct timespec patience = {20, 0};
	while (atomic_load(word) == value) {
		long result = syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &patience, NULL, 0);
		if (result != 0 && errno == ETIMEDOUT) die("HANG: futex at %p stays %u", (void *)word, value);
		MUST(result == 0 || errno == EAGAIN || errno == EINTR);
	}
}

static unsigned char *room;

static void *player(void *argument)
{
	uintptr_t which = (uintptr_t)argument;
	_Atomic uint32_t *word = (_Atomic uint32_t *)(void *)(room + which / 2 * 4 * PAGE);
	for (uint32_t turn = (uint32_t)(which % 2); turn < 60; turn += 2) {
		for (uint32_t now; (now = atomic_load(word)) != turn;) futex_wait(word, now);
		if (turn % 10 == 0) sleep_ms(30);
		atomic_store(word, turn + 1);
		syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	}
	return NULL;
}

static void cold(void)
{
	room = map_private(PAIRS * 4 * PAGE);
	pthread_t threads[PAIRS * 2];
	for (uintptr_t i = 0; i < PAIRS * 2; i++) MUST(pthread_create(&threads[i], NULL, player, (void *)i) == 0);
	for (int i = 0; i < 12; i++) filler_walk();
	for (size_t i = 0; i < PAIRS * 2; i++) pthread_join(threads[i], NULL);
	for (size_t i = 0; i < PAIRS; i++) MUST(*(uint32_t *)(void *)(room + i * 4 * PAGE) == 60);
}

struct cell {
	pthread_mutex_t mutex;
	pthread_cond_t condition;
	uint64_t value;
};
enum { CELLS = 512, ADDS = 4000, ADDERS = 4 };

static struct cell *cell(size_t which) { return (struct cell *)(void *)(room + which % CELLS * PAGE + 128); }

static void *adder(void *argument)
{
	uint64_t state = (uintptr_t)argument + 1;
	for (int i = 0; i < ADDS; i++) {
		struct cell *to = cell(mix(state++ * 77));
		MUST(pthread_mutex_lock(&to->mutex) == 0);
		uint64_t value = to->value;
		if (i % 64 == 0) sched_yield();
		to->value = value + 1;
		MUST(pthread_cond_broadcast(&to->condition) == 0);
		MUST(pthread_mutex_unlock(&to->mutex) == 0);
	}
	return NULL;
}

static void mutexes(void)
{
	room = map_private(CELLS * PAGE);
	for (size_t i = 0; i < CELLS; i++) {
		MUST(pthread_mutex_init(&cell(i)->mutex, NULL) == 0);
		MUST(pthread_cond_init(&cell(i)->condition, NULL) == 0);
	}
	push_out(room, CELLS);
	pthread_t threads[ADDERS];
	for (uintptr_t i = 0; i < ADDERS; i++) MUST(pthread_create(&threads[i], NULL, adder, (void *)(i << 20)) == 0);
	for (int i = 0; i < 6; i++) filler_walk();
	for (size_t i = 0; i < ADDERS; i++) pthread_join(threads[i], NULL);
	uint64_t sum = 0;
	for (size_t i = 0; i < CELLS; i++) sum += cell(i)->value;
	if (sum != (uint64_t)ADDS * ADDERS) die("LOST UPDATES: %ju of %ju", (uintmax_t)sum, (uintmax_t)ADDS * ADDERS);
}

static void shared(const struct area *area)
{
	void *common = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	MUST(common != MAP_FAILED);
	_Atomic uint32_t *word = common;
	pid_t child = fork();
	for (uint32_t turn = child == 0; turn < 40; turn += 2) {
		struct timespec patience = {20, 0};
		uint32_t now;
		while ((now = atomic_load(word)) != turn) {
			long result = syscall(SYS_futex, word, FUTEX_WAIT, now, &patience, NULL, 0);
			if (result != 0 && errno == ETIMEDOUT) die("HANG: a shared futex stays %u", now);
		}
		page_check(area->at + turn * PAGE, area->tag, turn, 1);
		page_write((unsigned char *)common + (turn + 1) * PAGE, 85, turn, 1);
		if (turn) page_check((unsigned char *)common + turn * PAGE, 85, turn - 1, 1);
		if (turn % 8 == 0) filler_walk();
		atomic_store(word, turn + 1);
		syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
	}
	if (child == 0) _exit(0);
	must_succeed(child);
}

static atomic_int owned, may_die;

static void *owner(void *argument)
{
	MUST(pthread_mutex_lock(argument) == 0);
	atomic_store(&owned, 1);
	while (!atomic_load(&may_die)) sleep_ms(50);
	return NULL;
}

static void robust(void)
{
	struct area around = area_new(MIB, 86, 1);
	pthread_mutex_t *mutex = (pthread_mutex_t *)(void *)(around.at + 100 * PAGE + 64);
	pthread_mutexattr_t attributes;
	MUST(pthread_mutexattr_init(&attributes) == 0);
	MUST(pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0);
	MUST(pthread_mutex_init(mutex, &attributes) == 0);
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, owner, mutex) == 0);
	while (!atomic_load(&owned)) sleep_ms(1);
	for (int i = 0; i < 3; i++) area_push_out(&around);
	atomic_store(&may_die, 1);
	pthread_join(thread, NULL);
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 5;
	int error = pthread_mutex_timedlock(mutex, &until);
	if (error != EOWNERDEAD) die("HANG: a robust mutex of a dead owner answers %d, not EOWNERDEAD", error);
}

/* Until this page has left too, unless it is one that never does. */
static void push_out_with(const struct area *around, size_t page)
{
	for (int i = 0; i < 60 && present_pages(around->at + page * PAGE, 1) != 0; i++) area_push_out(around);
}

static void inherits(void)
{
	struct area around = area_new(MIB, 87, 1);
	pthread_mutex_t *mutex = (pthread_mutex_t *)(void *)(around.at + 100 * PAGE + 64);
	pthread_mutexattr_t attributes;
	MUST(pthread_mutexattr_init(&attributes) == 0);
	if (pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT) != 0) lacks("PTHREAD_PRIO_INHERIT");
	MUST(pthread_mutex_init(mutex, &attributes) == 0);
	push_out_with(&around, 100);
	/* As the C library does when somebody else had it a moment ago; its first word is the futex. */
	MUST(syscall(SYS_futex, mutex, FUTEX_LOCK_PI_PRIVATE, 0, NULL, NULL, 0) == 0);
	MUST(syscall(SYS_futex, mutex, FUTEX_UNLOCK_PI_PRIVATE, 0, NULL, NULL, 0) == 0);
	MUST(pthread_mutex_lock(mutex) == 0 && pthread_mutex_unlock(mutex) == 0);
}

static int until_it_may_end(void *unused)
{
	(void)unused;
	/* It has no storage of its own, where the C library would keep errno. */
	while (!atomic_load(&may_die)) __asm__ volatile("pause");
	return 0;
}

static void ends(void)
{
	struct area around = area_new(MIB, 88, 1);
	_Atomic uint32_t *word = (_Atomic uint32_t *)(void *)(around.at + 100 * PAGE + 64);
	atomic_store(word, 1);
	unsigned char *stack = map_private(MIB);
	int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
	MUST(clone(until_it_may_end, stack + MIB, flags, NULL, NULL, NULL, word) > 0);
	push_out_with(&around, 100);
	atomic_store(&may_die, 1);
	/* Who looked at once would bring the page back for it. */
	sleep_ms(300);
	struct timespec patience = {5, 0};
	for (uint32_t now; (now = atomic_load(word)) != 0;) {
		long result = syscall(SYS_futex, word, FUTEX_WAIT, now, &patience, NULL, 0);
		if (result != 0 && errno == ETIMEDOUT) die("HANG: nobody is told that a thread has ended");
	}
}

int main(int argc, char **argv)
{
	struct area area = area_new(working_set() / 4, 26, 1);
	area_push_out(&area);
	if (mode_is(argc, argv, "cold")) cold();
	else if (mode_is(argc, argv, "mutexes")) mutexes();
	else if (mode_is(argc, argv, "shared")) shared(&area);
	else if (mode_is(argc, argv, "robust")) robust();
	else if (mode_is(argc, argv, "inherits")) inherits();
	else if (mode_is(argc, argv, "ends")) ends();
	else die("cold | mutexes | shared | robust | inherits | ends");
	area_check(&area, 1);
	return passed();
}
