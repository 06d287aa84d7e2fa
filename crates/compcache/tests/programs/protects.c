/*
 * Protection is the program's own: the pager neither adds rights nor takes them, and contents survive every change.
 *
 *   readonly   writes to a read-only, evicted page raise SIGSEGV at the right address; the handler allows them
 *   none       PROT_NONE and back
 *   toggles    threads change protections and contents without a pause
 */
#include "trap.h"

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

int main(int argc, char **argv)
{
	area = area_new(working_set() / 2, 18, 1);
	if (mode_is(argc, argv, "readonly")) readonly();
	else if (mode_is(argc, argv, "none")) none();
	else if (mode_is(argc, argv, "toggles")) toggles();
	else die("readonly | none | toggles");
	return passed();
}
