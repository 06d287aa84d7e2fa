/*
 * The program limits itself; the pager lives in the same process and must go on working.
 *
 *   as        RLIMIT_AS a little above what it uses
 *   data      RLIMIT_DATA likewise
 *   scattered RLIMIT_DATA of what it uses, and memory in many places that have no tables yet
 *   files     RLIMIT_NOFILE of the descriptors it has
 *   memlock   RLIMIT_MEMLOCK of zero
 *   processes RLIMIT_NPROC of zero
 *   seccomp   a filter on the calling thread alone, which refuses what a pager needs
 *   small_stacks  filters that are set by threads with the smallest stacks there are
 *   tsync     a filter on all threads that refuses nothing that matters
 *   tsync_forbids  the same, and it refuses what a pager needs
 *   strict    seccomp's strict mode on one thread: read, write, exit
 */
#include "trap.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static struct area area;

static size_t field_kib(const char *name)
{
	char text[8192];
	int fd = open("/proc/self/status", O_RDONLY);
	ssize_t length = read(fd, text, sizeof(text) - 1);
	close(fd);
	MUST(length > 0);
	text[length] = 0;
	char *at = strstr(text, name);
	MUST(at);
	return strtoul(at + strlen(name), NULL, 10);
}

static void limit(int which, rlim_t value)
{
	struct rlimit now = {value, value};
	MUST(setrlimit(which, &now) == 0);
}

static void work(void)
{
	for (uint64_t round = 1; round < 4; round++) {
		area_check(&area, round);
		area_fill(&area, round + 1);
		filler_walk();
	}
	area_push_out(&area);
	area_check(&area, 4);
}

static void refuse(const int *calls, size_t count, unsigned flags)
{
	struct sock_filter code[64];
	unsigned short at = 0;
	code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < count; i++) {
		code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1);
		code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
	}
	code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = {at, code};
	MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) != 0) lacks("seccomp");
}

static void *refuse_by_syscall(void *unused)
{
	static const int calls[] = {SYS_reboot};
	refuse(calls, 1, 0);
	return unused;
}

static void *refuse_by_prctl(void *unused)
{
	struct sock_filter code[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
	struct sock_fprog program = {1, code};
	MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) lacks("seccomp");
	return unused;
}

static void small_stacks(void)
{
	void *(*const refusing[])(void *) = {refuse_by_syscall, refuse_by_prctl};
	pthread_attr_t small;
	MUST(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 16 << 10) == 0);
	for (int i = 0; i < 2; i++) {
		pthread_t thread;
		MUST(pthread_create(&thread, &small, refusing[i], NULL) == 0 && pthread_join(thread, NULL) == 0);
	}
}

static void *strictly(void *argument)
{
	int *pair = argument;
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) lacks("strict seccomp");
	bool right = true;
	for (size_t page = 0; page < area.pages; page++)
		right = right && page_compare(area.at + page * PAGE, area.tag, page, 1) == WORDS;
	if (write(pair[1], right ? "r" : "w", 1) != 1) syscall(SYS_exit, 1);
	syscall(SYS_exit, 0);
	return NULL;
}

static bool is_over;

/* Walks over memory, and changes the map, until the filter is there. */
static void *walk_and_map(void *unused)
{
	while (!__atomic_load_n(&is_over, __ATOMIC_ACQUIRE)) {
		unsigned char *at = map_private(MIB);
		memset(at, 1, MIB);
		filler_walk();
		for (size_t byte = 0; byte < MIB; byte++)
			if (at[byte] != 1) die("WRONG BYTES: %d at %zu", at[byte], byte);
		MUST(munmap(at, MIB) == 0);
	}
	return unused;
}

#define PIECES 700
#define PIECE (MIB / 16)

/*
 * Memory that is writable from before the limit on, a little in every two megabytes: what is known of each piece takes a table of its own.
 * A page repeats one word, so that it takes no room in the pool, which cannot grow either.
 */
static void scattered(void)
{
	unsigned char *all = mmap(NULL, PIECES * 2 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	MUST(all != MAP_FAILED);
	for (size_t i = 0; i < PIECES; i++) MUST(mprotect(all + i * 2 * MIB, PIECE, PROT_READ | PROT_WRITE) == 0);
	limit(RLIMIT_DATA, field_kib("VmData:") << 10);
	for (uint64_t round = 1; round < 6; round++) {
		for (size_t i = 0; i < PIECES; i++) {
			uint64_t *words = (uint64_t *)(all + i * 2 * MIB);
			for (size_t word = 0; word < PIECE / 8; word++) {
				uint64_t page = i << 20 | word / WORDS << 8;
				if (round > 1 && words[word] != page + round - 1)
					die("WRONG BYTES: %llx in piece %zu, word %zu", (unsigned long long)words[word], i, word);
				words[word] = page + round;
			}
		}
	}
	area_check(&area, 1);
}

int main(int argc, char **argv)
{
	filler_walk();
	bool early = mode_is(argc, argv, "seccomp");
	if (!early) {
		area = area_new(working_set() / 2, 34, 1);
		area_push_out(&area);
	}
	if (mode_is(argc, argv, "as")) {
		limit(RLIMIT_AS, (field_kib("VmSize:") << 10) + 2 * MIB);
		MUST(mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
		work();
	} else if (mode_is(argc, argv, "data")) {
		limit(RLIMIT_DATA, (field_kib("VmData:") << 10) + 2 * MIB);
		MUST(mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
		work();
	} else if (mode_is(argc, argv, "scattered")) {
		scattered();
	} else if (mode_is(argc, argv, "files")) {
		limit(RLIMIT_NOFILE, 4);
		work();
		pid_t child = fork();
		if (child == 0) {
			area_check(&area, 4);
			_exit(0);
		}
		must_succeed(child);
	} else if (mode_is(argc, argv, "memlock")) {
		limit(RLIMIT_MEMLOCK, 0);
		work();
	} else if (mode_is(argc, argv, "processes")) {
		limit(RLIMIT_NPROC, 0);
		work();
	} else if (early) {
		/* Before there is anything to evict: a thread that a pager starts later must not inherit the filter. */
		static const int calls[] = {SYS_ioctl, SYS_userfaultfd, SYS_mremap, SYS_madvise, SYS_clone, SYS_clone3, SYS_unshare};
		refuse(calls, sizeof(calls) / sizeof(calls[0]), 0);
		area = area_new(working_set() / 2, 34, 1);
		area_push_out(&area);
		work();
	} else if (mode_is(argc, argv, "small_stacks")) {
		small_stacks();
		work();
	} else if (mode_is(argc, argv, "tsync")) {
		static const int calls[] = {SYS_reboot, SYS_swapon, SYS_mount, SYS_ptrace};
		refuse(calls, sizeof(calls) / sizeof(calls[0]), SECCOMP_FILTER_FLAG_TSYNC);
		work();
	} else if (mode_is(argc, argv, "tsync_forbids")) {
		/* What a pager needs: it must leave, and all memory come back. Others use theirs meanwhile. */
		static const int calls[] = {SYS_ioctl, SYS_madvise, SYS_ppoll, SYS_open};
		pthread_t threads[2];
		for (size_t i = 0; i < 2; i++) MUST(pthread_create(&threads[i], NULL, walk_and_map, NULL) == 0);
		sleep_ms(50);
		refuse(calls, sizeof(calls) / sizeof(calls[0]), SECCOMP_FILTER_FLAG_TSYNC);
		__atomic_store_n(&is_over, true, __ATOMIC_RELEASE);
		area_check(&area, 1);
		for (size_t i = 0; i < 2; i++) MUST(pthread_join(threads[i], NULL) == 0);
		area_check(&area, 1);
		area_fill(&area, 2);
		filler_walk();
		area_check(&area, 2);
		pid_t child = fork();
		if (child == 0) {
			area_check(&area, 2);
			_exit(0);
		}
		must_succeed(child);
	} else if (mode_is(argc, argv, "strict")) {
		int pair[2];
		pthread_t thread;
		char verdict = 0;
		MUST(pipe(pair) == 0 && pthread_create(&thread, NULL, strictly, pair) == 0);
		MUST(read(pair[0], &verdict, 1) == 1 && verdict == 'r');
		work();
	} else {
		die("as | data | scattered | files | memlock | processes | seccomp | small_stacks | tsync | tsync_forbids | strict");
	}
	return passed();
}
