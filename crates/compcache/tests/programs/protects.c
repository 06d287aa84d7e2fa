/*
 * Protection is the program's own: the pager neither adds rights nor takes them, and contents survive every change.
 *
 *   readonly   writes to a read-only, evicted page raise SIGSEGV at the right address; the handler allows them
 *   none       PROT_NONE and back
 *   toggles    threads change protections and contents without a pause
 *   code       memory that may be written and executed leaves like any other, and is run when it comes back
 *   refused    such memory, and from then on the system gives the process no more of it
 *   mixed      pieces of either kind, smaller than what moves at once
 *   beside     such memory beside much that is locked in pieces, and cannot leave
 */
#include "trap.h"
#include <sys/prctl.h>

static struct area area;
static atomic_int caught;
static atomic_bool stop;

static void allow(int signal, siginfo_t *info, void *context)
{
	(void)signal;
	(void)context;
	unsigned char *at = info->si_addr;
	if (at < area.at || at >= area.at + area.pages * PAGE) die("SIGSEGV at %p, outside of the area", (void *)at);
	if (info->si_code != SEGV_ACCERR) die("SIGSEGV at %p with code %d", (void *)at, info->si_code);
	atomic_fetch_add(&caught, 1);
	MUST(mprotect(at - (uintptr_t)at % PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
}

static void readonly(void)
{
	struct sigaction action = {.sa_sigaction = allow, .sa_flags = SA_SIGINFO};
	MUST(sigaction(SIGSEGV, &action, NULL) == 0);
	for (uint64_t round = 1; round < 3; round++) {
		/* Evicted while it can be written: what is read-only already need not leave (UFFDIO_MOVE refuses it). */
		area_push_out(&area);
		MUST(mprotect(area.at, area.pages * PAGE, PROT_READ) == 0);
		filler_walk();
		atomic_store(&caught, 0);
		int written = 0;
		for (size_t page = 0; page < area.pages; page += 16, written++) page_write(area.at + page * PAGE, area.tag, page, round + 1);
		if (atomic_load(&caught) != written) die("%d writes to read-only pages, %d signals", written, atomic_load(&caught));
		for (size_t page = 0; page < area.pages; page++) page_check(area.at + page * PAGE, area.tag, page, page % 16 ? round : round + 1);
		MUST(mprotect(area.at, area.pages * PAGE, PROT_READ | PROT_WRITE) == 0);
		area_fill(&area, round + 1);
	}
	area_check(&area, 3);
}

static void none(void)
{
	for (uint64_t round = 1; round < 4; round++) {
		if (round != 2) area_push_out(&area);
		MUST(mprotect(area.at, area.pages * PAGE, PROT_NONE) == 0);
		filler_walk();
		filler_walk();
		/* System calls see the protection too. */
		errno = 0;
		MUST(write(1, area.at + 5 * PAGE, 1) == -1 && errno == EFAULT);
		MUST(mprotect(area.at, area.pages * PAGE, PROT_READ | PROT_WRITE) == 0);
		area_check(&area, round);
		area_fill(&area, round + 1);
	}
}

static void *toggle(void *argument)
{
	uint64_t tag = (uintptr_t)argument, round = 0;
	struct area mine = area_new(2 * MIB, tag, 0);
	uint64_t known[512] = {0};
	while (!atomic_load(&stop)) {
		uint64_t random = mix(tag << 32 | ++round);
		size_t from = random % mine.pages, count = 1 + (random >> 16) % (mine.pages - from);
		static const int rights[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_EXEC};
		MUST(mprotect(mine.at + from * PAGE, count * PAGE, rights[(random >> 40) % 4]) == 0);
		if (random >> 58 == 0) sleep_ms(1);
		MUST(mprotect(mine.at + from * PAGE, count * PAGE, PROT_READ | PROT_WRITE) == 0);
		for (size_t page = from; page < from + count; page++) {
			page_check(mine.at + page * PAGE, tag, page, known[page]);
			if ((random >> 50 & 3) == 0) page_write(mine.at + page * PAGE, tag, page, known[page] = round);
		}
	}
	return NULL;
}

static void toggles(void)
{
	pthread_t threads[3];
	for (uintptr_t i = 0; i < 3; i++) MUST(pthread_create(&threads[i], NULL, toggle, (void *)(i + 30)) == 0);
	double until = seconds_now() + 2;
	while (seconds_now() < until) filler_walk();
	atomic_store(&stop, true);
	for (size_t i = 0; i < 3; i++) pthread_join(threads[i], NULL);
	area_check(&area, 1);
}

/* Memory that may be written and executed. */
static struct area new_code(size_t bytes, uint64_t tag)
{
	struct area code = area_over(map_private(bytes), bytes, tag);
	if (mprotect(code.at, bytes, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) lacks("memory that may be written and executed");
	return code;
}

/* A page of an area with a function in the place of its first word, which returns the page's number and generation. */
static void code_write(const struct area *code, size_t page, uint32_t generation)
{
	unsigned char *at = code->at + page * PAGE;
	uint32_t value = (uint32_t)page << 8 | generation;
	page_write(at, code->tag, page, generation);
	at[0] = 0xb8; /* mov $value, %eax; ret */
	memcpy(at + 1, &value, sizeof(value));
	at[5] = 0xc3;
}

static void code_check(const struct area *code, size_t page, uint32_t generation)
{
	unsigned char *at = code->at + page * PAGE;
	uint32_t value = ((uint32_t(*)(void))(uintptr_t)at)();
	if (value != ((uint32_t)page << 8 | generation)) die("WRONG CODE at %p, page %zu: it says %#x", (void *)at, page, value);
	uint64_t copy[WORDS];
	memcpy(copy, at, PAGE);
	copy[0] = page_seed(code->tag, page, generation);
	page_check(copy, code->tag, page, generation);
}

static void code_check_all(const struct area *code, uint32_t generation)
{
	for (size_t page = 0; page < code->pages; page++) code_check(code, page, generation);
}

static struct area shared_code;

static void *run_code(void *argument)
{
	for (uint64_t at = (uintptr_t)argument; !atomic_load(&stop); at++)
		code_check(&shared_code, mix(at) % shared_code.pages, 1);
	return NULL;
}

static void code(void)
{
	struct area code = new_code(working_set() / 2, 31);
	for (size_t page = 0; page < code.pages; page++) code_write(&code, page, 1);
	if (getenv("TRAP_PLANT")) code.at[code.pages / 2 * PAGE + 1234] ^= 1;
	for (uint32_t round = 1; round < 4; round++) {
		area_push_out(&code);
		code_check_all(&code, round);
		/* Pieces of either kind side by side, in one run of pages. */
		for (size_t page = 0; page < code.pages; page += 48) {
			size_t count = code.pages - page < 24 ? code.pages - page : 24;
			MUST(mprotect(code.at + page * PAGE, count * PAGE, PROT_READ | PROT_WRITE) == 0);
		}
		area_push_out(&code);
		MUST(mprotect(code.at, code.pages * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
		code_check_all(&code, round);
		area_push_out(&code);
		pid_t child = fork();
		if (child == 0) {
			code_check_all(&code, round);
			for (size_t page = 0; page < code.pages; page++) code_write(&code, page, round + 10);
			area_push_out(&code);
			code_check_all(&code, round + 10);
			_exit(0);
		}
		for (size_t page = 0; page < code.pages; page += 2) code_check(&code, page, round);
		must_succeed(child);
		code_check_all(&code, round);
		for (size_t page = 0; page < code.pages; page++) code_write(&code, page, round + 1);
		/* All memory is locked, and is no longer. */
		if (round == 2 && mlockall(MCL_CURRENT) == 0) {
			code_check_all(&code, round + 1);
			MUST(munlockall() == 0);
		}
	}
	/* Run by some while others have it pushed out. */
	for (size_t page = 0; page < code.pages; page++) code_write(&code, page, 1);
	shared_code = code;
	pthread_t threads[2];
	for (uintptr_t i = 0; i < 2; i++) MUST(pthread_create(&threads[i], NULL, run_code, (void *)(i << 32)) == 0);
	double until = seconds_now() + 2;
	while (seconds_now() < until) filler_walk();
	atomic_store(&stop, true);
	for (size_t i = 0; i < 2; i++) pthread_join(threads[i], NULL);
	code_check_all(&code, 1);
}

static void refused(void)
{
	struct area code = new_code(MIB, 35);
	for (size_t page = 0; page < code.pages; page++) code_write(&code, page, 1);
	area_push_out(&code);
	/* PR_SET_MDWE: what could not be executed before cannot be made so. */
	if (prctl(65, 1, 0, 0, 0) != 0) lacks("PR_SET_MDWE");
	for (int round = 0; round < 3; round++) {
		if (mlockall(MCL_CURRENT) != 0) lacks("mlockall");
		code_check_all(&code, 1);
		MUST(munlockall() == 0);
		/* What is no code leaves as it did. */
		area_push_out(&area);
		code_check_all(&code, 1);
		area_check(&area, 1);
	}
}

/* Every third piece may be executed. */
static void mixed(void)
{
	enum { PIECE = 45 };
	struct area all = area_over(map_private(working_set()), working_set(), 34);
	for (size_t page = 0; page < all.pages; page += 3 * PIECE) {
		size_t count = all.pages - page < PIECE ? all.pages - page : PIECE;
		MUST(mprotect(all.at + page * PAGE, count * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
	}
	for (uint32_t round = 1; round < 4; round++) {
		for (size_t page = 0; page < all.pages; page++)
			if (page / PIECE % 3 == 0) code_write(&all, page, round);
			else page_write(all.at + page * PAGE, all.tag, page, round);
		for (size_t page = 0; page < all.pages; page++)
			if (page / PIECE % 3 == 0) code_check(&all, page, round);
			else page_check(all.at + page * PAGE, all.tag, page, round);
	}
	area_push_out(&all);
}

static void beside(void)
{
	enum { PIECE = 16, GAP = 2 };
	struct area code = new_code(MIB, 32), locked = area_new(working_set(), 33, 1);
	for (uint32_t round = 1; round < 4; round++) {
		for (size_t page = 0; page < code.pages; page++) code_write(&code, page, round);
		for (size_t page = 0; page + PIECE <= locked.pages; page += PIECE + GAP)
			if (mlock(locked.at + page * PAGE, PIECE * PAGE) != 0) lacks("mlock");
		area_check(&locked, 1);
		code_check_all(&code, round);
		/* Nobody tries for ever what is not to be had. */
		long used_ms = 500;
		for (int wait = 0; wait < 20 && used_ms > 100; wait++) {
			struct timespec before, after;
			MUST(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before) == 0);
			sleep_ms(500);
			MUST(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after) == 0);
			used_ms = (after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000;
		}
		if (used_ms > 100) die("IN VAIN: %ld ms of work while the program sleeps", used_ms);
		code_check_all(&code, round);
		MUST(munlock(locked.at, locked.pages * PAGE) == 0);
	}
	area_push_out(&locked);
	area_check(&locked, 1);
}

int main(int argc, char **argv)
{
	area = area_new(working_set() / 2, 18, 1);
	if (mode_is(argc, argv, "readonly")) readonly();
	else if (mode_is(argc, argv, "none")) none();
	else if (mode_is(argc, argv, "toggles")) toggles();
	else if (mode_is(argc, argv, "code")) code();
	else if (mode_is(argc, argv, "beside")) beside();
	else if (mode_is(argc, argv, "refused")) refused();
	else if (mode_is(argc, argv, "mixed")) mixed();
	else die("readonly | none | toggles | code | beside | mixed | refused");
	return passed();
}
