/*
 * More memory than there is, and none of it compresses: every word of a page is drawn from a generator that place and generation
 * seed, so that a page of another place, or an older one, is noticed at its first word.
 *
 *   spills work MB THREADS PASSES   each thread writes its part, then reads and rewrites parts of it in another order
 *   spills fork MB                  a child and a grandchild read what their ancestors wrote, change half of it, and so does each parent
 *   spills forks MB ROUNDS          a parent that changes everything after each fork, whose children check slowly what was there
 *   spills outlived MB              the parent ends at once; the child reads what it had
 *   spills fileless MB DIR          a child that finds no place for a file of its own, DIR being gone, reads what it had
 *   spills frees MB                 gives up what it wrote, and a child that is a new program needs as much
 *   spills exec MB                  work, then the same program again in its place
 *   spills closes MB                work, with every descriptor closed now and then
 *   spills skips MB                 "ready" when written; at a line it touches 24 pages, in order and backwards, and says how many were SIGBUS; at the
 *                                   next all others, and says it again
 *   spills waits MB                 "ready" when written; then reads at each line of its input, and says "right" or dies by a signal
 */
#include "trap.h"

#include <setjmp.h>

static uint64_t *memory;
static size_t pages;
static uint32_t *generations;

static uint64_t mixed(uint64_t word)
{
	word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
	word = (word ^ word >> 27) * 0x94d049bb133111ebu;
	return word ^ word >> 31;
}

static void write_noise(size_t page, uint32_t generation)
{
	uint64_t *at = memory + page * WORDS, seed = mixed((uint64_t)page << 32 | generation);
	for (size_t word = 0; word < WORDS; word++)
		at[word] = mixed(seed + word);
	generations[page] = generation;
}

static void check_noise(size_t page)
{
	const uint64_t *at = memory + page * WORDS;
	uint64_t seed = mixed((uint64_t)page << 32 | generations[page]);
	for (size_t word = 0; word < WORDS; word++)
		if (at[word] != mixed(seed + word))
			die("MISMATCH at page %zu word %zu generation %u", page, word, generations[page]);
}

static void check_all(void)
{
	for (size_t page = 0; page < pages; page++)
		check_noise(page);
}

static void write_all(uint32_t generation)
{
	for (size_t page = 0; page < pages; page++)
		write_noise(page, generation);
}

struct part {
	size_t first, last, passes;
};

static void *work_on(void *argument)
{
	const struct part *part = argument;
	size_t count = part->last - part->first;
	for (size_t page = part->first; page < part->last; page++)
		write_noise(page, 1);
	for (size_t pass = 0; pass < part->passes; pass++) {
		for (size_t nth = 0; nth < count; nth++) {
			/* Forwards, then backwards, then all over the place. */
			size_t offset = pass % 3 == 0 ? nth : pass % 3 == 1 ? count - 1 - nth : (nth * 7919 + pass) % count;
			size_t page = part->first + offset;
			check_noise(page);
			if (mixed(page + pass) % 4 == 0)
				write_noise(page, (uint32_t)pass + 2);
		}
	}
	for (size_t page = part->first; page < part->last; page++)
		check_noise(page);
	return NULL;
}

static void work(size_t threads, size_t passes)
{
	pthread_t handles[64];
	struct part parts[64];
	if (threads > 64) die("too many threads");
	for (size_t i = 0; i < threads; i++) {
		parts[i] = (struct part){pages * i / threads, pages * (i + 1) / threads, passes};
		if (pthread_create(&handles[i], NULL, work_on, &parts[i])) die("no thread");
	}
	for (size_t i = 0; i < threads; i++)
		pthread_join(handles[i], NULL);
}

static void change_every_second(size_t from, uint32_t generation)
{
	for (size_t page = from; page < pages; page += 2)
		write_noise(page, generation);
}

static void await_child(pid_t child)
{
	int status;
	if (waitpid(child, &status, 0) != child || status != 0)
		die("a child ended with status %#x", (unsigned)status);
}

static void forks(void)
{
	write_all(1);
	for (uint32_t depth = 0; depth < 3; depth++) {
		pid_t child = fork();
		if (child < 0) die("fork: %s", strerror(errno));
		if (child != 0) {
			check_all();
			change_every_second(depth % 2, 100 + depth);
			check_all();
			await_child(child);
			check_all();
			if (depth > 0) _exit(0);
			return;
		}
		check_all();
		change_every_second(depth % 2, 200 + depth);
		check_all();
	}
	write_all(300);
	check_all();
	_exit(0);
}

static void many_forks(size_t rounds)
{
	pid_t before = 0;
	write_all(1);
	for (uint32_t round = 0; round < rounds; round++) {
		pid_t child = fork();
		if (child < 0) die("fork: %s", strerror(errno));
		if (child == 0) {
			for (size_t page = 0; page < pages; page += 3) {
				check_noise(page);
				if (page % 96 == 0) usleep(1000);
			}
			_exit(0);
		}
		write_all(round + 2);
		if (before) await_child(before);
		before = child;
	}
	await_child(before);
	check_all();
}

static void outlived(void)
{
	int said[2];
	char verdict = 0;
	if (pipe(said)) die("no pipe");
	pid_t child = fork();
	if (child == 0) {
		close(said[0]);
		write_all(1);
		if (fork() != 0) _exit(0);
		usleep(100000);
		check_all();
		change_every_second(0, 2);
		check_all();
		if (write(said[1], "r", 1) != 1) _exit(1);
		_exit(0);
	}
	close(said[1]);
	await_child(child);
	if (read(said[0], &verdict, 1) != 1 || verdict != 'r') die("the one that was outlived left nothing right");
}

static void fileless(const char *directory)
{
	write_all(1);
	if (rmdir(directory)) die("rmdir: %s", strerror(errno));
	pid_t child = fork();
	if (child < 0) die("fork: %s", strerror(errno));
	if (child == 0) {
		check_all();
		_exit(0);
	}
	await_child(child);
	check_all();
}

static void frees(const char *mib)
{
	write_all(1);
	check_all();
	if (munmap(memory, pages * PAGE)) die("munmap: %s", strerror(errno));
	pid_t child = fork();
	if (child < 0) die("fork: %s", strerror(errno));
	if (child == 0) {
		execl("/proc/self/exe", "spills", "work", mib, "2", "1", (char *)NULL);
		die("exec: %s", strerror(errno));
	}
	await_child(child);
}

static sigjmp_buf out_of_page;

static void on_bus(int signal)
{
	(void)signal;
	siglongjmp(out_of_page, 1);
}

/* 0, or 1 if the page is lost. */
static int is_lost(size_t page)
{
	if (sigsetjmp(out_of_page, 1)) return 1;
	check_noise(page);
	return 0;
}

static void skips(void)
{
	char line[64];
	size_t ahead = pages / 8, back = pages / 4;
	int lost = 0, later = 0;
	struct sigaction action = {.sa_handler = on_bus};
	if (sigaction(SIGBUS, &action, NULL)) die("sigaction: %s", strerror(errno));
	write_all(1);
	check_all();
	puts("ready");
	fflush(stdout);
	if (!fgets(line, sizeof line, stdin)) die("no line");
	for (size_t nth = 0; nth < 12; nth++)
		lost += is_lost(ahead + nth) + is_lost(back - nth);
	printf("lost %d\n", lost);
	fflush(stdout);
	if (!fgets(line, sizeof line, stdin)) die("no line");
	for (size_t page = 0; page < pages; page++)
		if ((page < ahead || page >= ahead + 12) && (page <= back - 12 || page > back))
			later += is_lost(page);
	printf("later %d\n", later);
}

int main(int count, char **arguments)
{
	const char *mode = count > 1 ? arguments[1] : "work";
	size_t given[3] = {64, 1, 1};
	for (int i = 2; i < count && i < 5; i++)
		given[i - 2] = strtoull(arguments[i], NULL, 10);
	pages = given[0] * MIB / PAGE;
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	generations = calloc(pages, sizeof *generations);
	if (memory == MAP_FAILED || !generations) die("no memory");
	if (!strcmp(mode, "work")) {
		work(given[1], given[2]);
	} else if (!strcmp(mode, "fork")) {
		forks();
	} else if (!strcmp(mode, "forks")) {
		many_forks(given[1]);
	} else if (!strcmp(mode, "outlived")) {
		outlived();
	} else if (!strcmp(mode, "fileless") && count > 3) {
		fileless(arguments[3]);
	} else if (!strcmp(mode, "frees") && count > 2) {
		frees(arguments[2]);
	} else if (!strcmp(mode, "exec")) {
		work(2, 1);
		execl("/proc/self/exe", "spills", "work", arguments[2], "2", "1", (char *)NULL);
		die("exec: %s", strerror(errno));
	} else if (!strcmp(mode, "closes")) {
		for (int round = 0; round < 3; round++) {
			if (syscall(SYS_close_range, 3, ~0u, 0)) die("close_range: %s", strerror(errno));
			work(2, 1);
		}
	} else if (!strcmp(mode, "skips")) {
		skips();
	} else if (!strcmp(mode, "waits")) {
		char line[64];
		write_all(1);
		check_all();
		puts("ready");
		fflush(stdout);
		while (fgets(line, sizeof line, stdin)) {
			check_all();
			puts("right");
			fflush(stdout);
		}
	} else {
		die("%s: no such mode", mode);
	}
	puts("spills: right");
	return 0;
}
