/*
 * What every trap program shares: page contents that can be checked, a way to make memory cold, and a verdict.
 *
 * A page's contents follow from (tag, page number, generation): every sixteenth word is unique to all three, the rest
 * are drawn from sixty-four tokens, so that a page compresses about 2.4 : 1 with LZ4 and is never same-filled, and so
 * that a page of another place or of an older generation is noticed at the first word.
 *
 * Environment (the test harness sets it; all of it is optional):
 *
 *   TRAP_MB               the working set in MiB (32)
 *   TRAP_EXPECT_EVICTION  memory that was made cold must really have left: else the program fails, because a trap that
 *                         springs on resident memory proves nothing
 *   TRAP_PLANT            damage one byte before the first check: the program must fail
 *
 * Exit status: 0 right, 1 wrong, 77 this machine lacks something (said on stderr).
 */
#ifndef TRAP_H
#define TRAP_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define WORDS (PAGE / 8)
#define MIB ((size_t)1 << 20)
#define UNUSED __attribute__((unused))

/* Where a failure is reported: stderr, or a file of a program that closes stderr. */
static int report_fd UNUSED = 2;

/* Needs neither the heap nor stdio, so it can be called from anywhere. */
static UNUSED __attribute__((noreturn, format(printf, 1, 2))) void die(const char *format, ...)
{
	char line[512];
	va_list list;
	va_start(list, format);
	int length = vsnprintf(line, sizeof(line) - 1, format, list);
	va_end(list);
	if (length < 0) length = 0;
	if ((size_t)length > sizeof(line) - 2) length = sizeof(line) - 2;
	line[length++] = '\n';
	if (write(report_fd, line, (size_t)length) < 0) _exit(2);
	_exit(1);
}

#define MUST(condition)                                                                                                \
	do {                                                                                                           \
		if (!(condition)) die("%s:%d: %s: errno %d", __FILE__, __LINE__, #condition, errno);                   \
	} while (0)

static UNUSED __attribute__((noreturn)) void lacks(const char *what)
{
	dprintf(2, "lacks: %s (errno %d)\n", what, errno);
	_exit(77);
}

static UNUSED double seconds_now(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static UNUSED void sleep_ms(long ms)
{
	struct timespec pause = {ms / 1000, (ms % 1000) * 1000000};
	nanosleep(&pause, NULL);
}

static UNUSED bool expects_eviction(void) { return getenv("TRAP_EXPECT_EVICTION") != NULL; }

static UNUSED size_t working_set(void)
{
	const char *mb = getenv("TRAP_MB");
	size_t value = mb ? strtoul(mb, NULL, 10) : 0;
	return (value ? value : 32) * MIB;
}

static UNUSED uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

/* Sixty-four tokens of eight letters, as the text of a program's heap repeats its words. */
static UNUSED uint64_t token(unsigned which)
{
	return 0x2065676170206120u ^ ((uint64_t)(which & 63) * 0x0003070f00010305u);
}

static UNUSED uint64_t page_seed(uint64_t tag, size_t page, uint64_t generation)
{
	return mix(tag * 0x100000001b3u ^ mix(page) ^ mix(generation << 20));
}

static UNUSED void page_write(void *to, uint64_t tag, size_t page, uint64_t generation)
{
	volatile uint64_t *words = to;
	uint64_t seed = page_seed(tag, page, generation), step = seed;
	for (unsigned i = 0; i < WORDS; i++) {
		step = step * 6364136223846793005u + 1442695040888963407u;
		words[i] = (i & 15) == 0 ? seed + i : token((unsigned)(step >> 58));
	}
}

/* The first wrong word of a page, or WORDS when all are right. */
static UNUSED unsigned page_compare(const void *at, uint64_t tag, size_t page, uint64_t generation)
{
	const volatile uint64_t *words = at;
	uint64_t seed = page_seed(tag, page, generation), step = seed;
	for (unsigned i = 0; i < WORDS; i++) {
		step = step * 6364136223846793005u + 1442695040888963407u;
		if (words[i] != ((i & 15) == 0 ? seed + i : token((unsigned)(step >> 58)))) return i;
	}
	return WORDS;
}

static UNUSED void page_check(const void *at, uint64_t tag, size_t page, uint64_t generation)
{
	unsigned wrong = page_compare(at, tag, page, generation);
	if (wrong == WORDS) return;
	const volatile uint64_t *words = at;
	uint64_t found = words[wrong];
	unsigned zeroes = 0, again = page_compare(at, tag, page, generation);
	for (unsigned i = 0; i < WORDS; i++) zeroes += words[i] == 0;
	die("WRONG BYTES at %p (pid %d tag %llu page %zu generation %llu): word %u is %016llx; %u of %zu words are 0; "
	    "read again: %s",
	    at, getpid(), (unsigned long long)tag, page, (unsigned long long)generation, wrong,
	    (unsigned long long)found, zeroes, WORDS, again == WORDS ? "right" : "wrong");
}

static UNUSED bool page_is_zero(const void *at)
{
	const volatile uint64_t *words = at;
	for (unsigned i = 0; i < WORDS; i++)
		if (words[i]) return false;
	return true;
}

static UNUSED void must_be_zero(const void *at, size_t bytes, const char *when)
{
	for (size_t done = 0; done < bytes; done += PAGE)
		if (!page_is_zero((const char *)at + done))
			die("NOT ZERO at %p, page %zu of %zu: %s; first word %016llx", (const void *)((const char *)at + done),
			    done / PAGE, bytes / PAGE, when, (unsigned long long)*(const uint64_t *)((const char *)at + done));
}

/* A run of pages, all of one generation. */
struct area {
	unsigned char *at;
	size_t pages;
	uint64_t tag;
};

static UNUSED void *map_private(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(at != MAP_FAILED);
	return at;
}

static UNUSED void area_fill(const struct area *area, uint64_t generation)
{
	for (size_t page = 0; page < area->pages; page++) page_write(area->at + page * PAGE, area->tag, page, generation);
}

static UNUSED void area_check(const struct area *area, uint64_t generation)
{
	static atomic_bool planted;
	if (getenv("TRAP_PLANT") && !atomic_exchange(&planted, true)) {
		unsigned char *page = area->at + area->pages / 2 * PAGE;
		mprotect(page, PAGE, PROT_READ | PROT_WRITE);
		page[1234] ^= 1;
	}
	for (size_t page = 0; page < area->pages; page++) page_check(area->at + page * PAGE, area->tag, page, generation);
}

static UNUSED struct area area_over(void *at, size_t bytes, uint64_t tag)
{
	return (struct area){at, bytes / PAGE, tag};
}

static UNUSED struct area area_new(size_t bytes, uint64_t tag, uint64_t generation)
{
	struct area area = area_over(map_private(bytes), bytes, tag);
	area_fill(&area, generation);
	return area;
}

/*
 * How many of these pages have all the bits of `which` in /proc/self/pagemap; -1 when the system does not say. A page
 * that is shared with a parent or a child since a fork is PRESENT, but not EXCLUSIVE.
 */
#define PRESENT ((uint64_t)1 << 63)
#define EXCLUSIVE ((uint64_t)1 << 56)

static UNUSED long pages_that_are(uint64_t which, const void *at, size_t pages)
{
	static atomic_int kept = -1;
	static pid_t kept_by;
	/* A program that gives up its rights asks while it has them (see changes_user.c). */
	int fd = kept_by == getpid() && getenv("TRAP_KEEP_PAGEMAP") ? atomic_load(&kept) : -1;
	bool mine = fd < 0;
	if (mine) fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (fd < 0) return -1;
	uint64_t entries[512];
	long counted = 0;
	for (size_t done = 0; done < pages;) {
		size_t count = pages - done < 512 ? pages - done : 512;
		ssize_t got = pread(fd, entries, count * 8, (off_t)(((uintptr_t)at / PAGE + done) * 8));
		if (got <= 0) {
			counted = -1;
			break;
		}
		for (size_t i = 0; i < (size_t)got / 8; i++) counted += (entries[i] & which) == which;
		done += (size_t)got / 8;
	}
	if (mine && getenv("TRAP_KEEP_PAGEMAP")) {
		atomic_store(&kept, fd);
		kept_by = getpid();
	} else if (mine) {
		close(fd);
	}
	return counted;
}

static UNUSED long present_pages(const void *at, size_t pages) { return pages_that_are(PRESENT, at, pages); }

/* Memory that is walked so that other memory gets cold: the size of the working set, contents known. */
static struct area filler_area UNUSED;
static pthread_mutex_t filler_lock UNUSED = PTHREAD_MUTEX_INITIALIZER;

static UNUSED void filler_walk(void)
{
	pthread_mutex_lock(&filler_lock);
	if (!filler_area.at) filler_area = area_new(working_set(), 0xf111, 1);
	for (size_t page = 0; page < filler_area.pages; page++) {
		/* The tag word of each page is enough to see that it is the right one. */
		volatile uint64_t *word = (volatile uint64_t *)(filler_area.at + page * PAGE);
		if (*word != page_seed(0xf111, page, 1)) page_check((void *)word, 0xf111, page, 1);
	}
	pthread_mutex_unlock(&filler_lock);
}

/*
 * Makes these pages cold. Under a pager it goes on until at most a quarter of them are present, and fails after many walks
 * and some seconds when TRAP_EXPECT_EVICTION is set; without a pager it walks once. What is not the walked memory's own takes
 * its turn by chance, one page in some thirty, so that most leave within ten walks, few need a hundred. Pages that another
 * process shares since a fork need not leave: nothing would be gained.
 */
static UNUSED void push_out(const void *at, size_t pages)
{
	if (!expects_eviction()) {
		filler_walk();
		return;
	}
	double start = seconds_now();
	for (unsigned walks = 0;; walks++) {
		filler_walk();
		/* Some pages leave only after a while, however often other memory is walked: those that MADV_FREE was for. */
		if (walks > 10) sleep_ms(50);
		long present = pages_that_are(PRESENT | EXCLUSIVE, at, pages);
		if (present < 0 || (size_t)present <= pages / 4) return;
		if (seconds_now() - start > 20 && walks > 300)
			die("NOT EVICTED: %ld of %zu pages at %p stay in memory (pid %d)", present, pages, at, getpid());
	}
}

static UNUSED void area_push_out(const struct area *area) { push_out(area->at, area->pages); }

/* A child's end, as the parent of a trap wants it. */
static UNUSED void must_succeed(pid_t child)
{
	int status;
	MUST(child > 0);
	while (waitpid(child, &status, 0) < 0) MUST(errno == EINTR);
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) die("child %d ended with status %#x", child, status);
}

static UNUSED bool mode_is(int argc, char **argv, const char *mode)
{
	return argc > 1 && strcmp(argv[1], mode) == 0;
}

static UNUSED int passed(void)
{
	static const char word[] = "right\n";
	return write(1, word, sizeof(word) - 1) < 0 ? 1 : 0;
}

#endif
