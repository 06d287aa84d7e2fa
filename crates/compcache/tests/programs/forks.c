/*
 * fork while memory is evicted: both sides go on, verify everything, change it, and verify again.
 *
 *   both_sides   one child, which goes on at the same time as its parent
 *   many         several children at once, each changing other pages
 *   from_thread  one thread forks while others keep changing their memory
 *   nested       a child of a child of a child
 *   exec_loop    a shell's life: fork and exec of /bin/true, again and again
 *   outlives     the parent dies at once; the child goes on and reports to the grandparent
 *   hidden       threads that sleep, made by libc's own pthread_create, past whoever took its name (jemalloc does so)
 *   keys         threads that sleep and have so many keys that libc keeps their values in the heap
 *   streams      while the list of open streams is what another thread has just made of it: leads nowhere
 *   straddling   while the beginning of an open stream, and what lies before it, is cold, and its end, in the next page, is not
 *   thread_local  from a thread whose errno lies far from its control block, and is cold
 */
#include "trap.h"
#include <ctype.h>
#include <dlfcn.h>

static void change(const struct area *area, size_t start, size_t stride, uint64_t generation)
{
	for (size_t page = start; page < area->pages; page += stride)
		page_write(area->at + page * PAGE, area->tag, page, generation);
}

static void check_changed(const struct area *area, size_t start, size_t stride, uint64_t old, uint64_t new)
{
	for (size_t page = 0; page < area->pages; page++)
		page_check(area->at + page * PAGE, area->tag, page, page >= start && (page - start) % stride == 0 ? new : old);
}

static void both_sides(struct area *area)
{
	area_push_out(area);
	pid_t child = fork();
	uint64_t mine = child == 0 ? 2 : 3;
	change(area, child == 0 ? 1 : 0, 2, mine);
	check_changed(area, child == 0 ? 1 : 0, 2, 1, mine);
	area_push_out(area);
	check_changed(area, child == 0 ? 1 : 0, 2, 1, mine);
	area_fill(area, mine + 10);
	area_push_out(area);
	area_check(area, mine + 10);
	if (child == 0) _exit(0);
	must_succeed(child);
}

static void many(struct area *area)
{
	enum { CHILDREN = 5 };
	for (uint64_t round = 0; round < 2; round++) {
		area_push_out(area);
		pid_t children[CHILDREN];
		for (size_t i = 0; i < CHILDREN; i++) {
			children[i] = fork();
			if (children[i] == 0) {
				change(area, i, CHILDREN, 100 + i);
				check_changed(area, i, CHILDREN, round + 1, 100 + i);
				filler_walk();
				check_changed(area, i, CHILDREN, round + 1, 100 + i);
				_exit(0);
			}
			/* The parent changes pages while its children start from what was there. */
			change(area, 0, 64, round + 1);
		}
		for (size_t i = 0; i < CHILDREN; i++) must_succeed(children[i]);
		area_check(area, round + 1);
		area_fill(area, round + 2);
	}
}

enum { MUTATORS = 3 };
static struct area moving[MUTATORS];
static _Atomic uint64_t generation_of[MUTATORS];
static atomic_bool stop;

static void *mutate(void *argument)
{
	size_t which = (uintptr_t)argument;
	for (uint64_t generation = 1; !atomic_load(&stop); generation++) {
		atomic_store(&generation_of[which], generation);
		area_fill(&moving[which], generation);
	}
	return NULL;
}

/* While a thread writes a page, fork may copy it half done: each word is of this generation, the last or the next. */
static void check_moving(const struct area *area, uint64_t generation)
{
	for (size_t page = 0; page < area->pages; page++) {
		const volatile uint64_t *words = (const volatile uint64_t *)(area->at + page * PAGE);
		if (page_compare((const void *)words, area->tag, page, generation) == WORDS) continue;
		if (page_compare((const void *)words, area->tag, page, generation - 1) == WORDS) continue;
		static uint64_t allowed[3][WORDS];
		for (uint64_t i = 0; i < 3; i++) page_write(allowed[i], area->tag, page, generation - 1 + i);
		for (unsigned i = 0; i < WORDS; i++) {
			uint64_t word = words[i];
			if (word != allowed[0][i] && word != allowed[1][i] && word != allowed[2][i])
				die("WRONG BYTES in a forked child at %p: page %zu word %u is %016llx, generation %llu +- 1",
				    (const void *)words, page, i, (unsigned long long)word, (unsigned long long)generation);
		}
	}
}

static void from_thread(struct area *area)
{
	pthread_t threads[MUTATORS];
	for (uintptr_t i = 0; i < MUTATORS; i++) {
		moving[i] = area_new(working_set() / 8, 50 + i, 0);
		atomic_store(&generation_of[i], 1);
		MUST(pthread_create(&threads[i], NULL, mutate, (void *)i) == 0);
	}
	for (int round = 0; round < 25; round++) {
		if (round % 8 == 0) area_push_out(area);
		pid_t child = fork();
		if (child == 0) {
			for (size_t i = 0; i < MUTATORS; i++) check_moving(&moving[i], atomic_load(&generation_of[i]));
			for (size_t page = (size_t)round; page < area->pages; page += 16)
				page_check(area->at + page * PAGE, area->tag, page, 1);
			_exit(0);
		}
		must_succeed(child);
	}
	atomic_store(&stop, true);
	for (size_t i = 0; i < MUTATORS; i++) pthread_join(threads[i], NULL);
	for (size_t i = 0; i < MUTATORS; i++) area_check(&moving[i], atomic_load(&generation_of[i]));
	area_check(area, 1);
}

static void nested(struct area *area, size_t depth)
{
	area_push_out(area);
	pid_t child = depth ? fork() : -1;
	if (child == 0) {
		area_check(area, 100 - depth);
		area_fill(area, 100 - depth + 1);
		nested(area, depth - 1);
		_exit(0);
	}
	filler_walk();
	area_check(area, 100 - depth);
	if (depth) must_succeed(child);
}

static void exec_loop(struct area *area)
{
	for (size_t round = 0; round < 40; round++) {
		pid_t child = fork();
		if (child == 0) {
			execl("/bin/true", "true", (char *)NULL);
			_exit(9);
		}
		for (size_t page = round; page < area->pages; page += 16)
			page_write(area->at + page * PAGE, area->tag, page, 1);
		must_succeed(child);
		if (round % 8 == 0) {
			area_push_out(area);
			area_check(area, 1);
		}
	}
}

static void outlives(struct area *area)
{
	area_push_out(area);
	int pipes[2];
	MUST(pipe(pipes) == 0);
	pid_t middle = fork();
	if (middle == 0) {
		if (fork() == 0) {
			close(pipes[0]);
			sleep_ms(200);
			area_check(area, 1);
			area_fill(area, 2);
			area_push_out(area);
			area_check(area, 2);
			MUST(write(pipes[1], "k", 1) == 1);
			_exit(0);
		}
		/* Dies like a process that the kernel killed: no handler of anybody runs. */
		kill(getpid(), SIGKILL);
	}
	close(pipes[1]);
	waitpid(middle, NULL, 0);
	char verdict = 0;
	MUST(read(pipes[0], &verdict, 1) == 1 && verdict == 'k');
	area_check(area, 1);
}

/* Threads that touch their stacks no more once they are here, until they are let go. */
enum { SLEEPERS = 8, KEYS = 40, PIECE = 2000, PIECES = 16 };
static pthread_barrier_t asleep;
static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t keys[KEYS];
static unsigned char *pieces[SLEEPERS][PIECES];

static void sleep_here(void)
{
	pthread_barrier_wait(&asleep);
	pthread_mutex_lock(&door);
	pthread_mutex_unlock(&door);
}

static void *sleep_only(void *argument)
{
	sleep_here();
	return argument;
}

/* What libc allocates for the last key's value lies between pieces of ours. */
static void *sleep_with_keys(void *argument)
{
	uintptr_t which = (uintptr_t)argument;
	for (size_t i = 0; i < PIECES; i++) {
		MUST((pieces[which][i] = malloc(PIECE)) != NULL);
		memset(pieces[which][i], (int)(which * PIECES + i + 1), PIECE);
		if (i == PIECES / 2) MUST(pthread_setspecific(keys[KEYS - 1], argument) == 0);
	}
	sleep_here();
	return argument;
}

static void check_pieces(void)
{
	for (size_t which = 0; which < SLEEPERS; which++)
		for (size_t i = 0; i < PIECES && pieces[which][i]; i++)
			for (size_t byte = 0; byte < PIECE; byte++)
				if (pieces[which][i][byte] != which * PIECES + i + 1)
					die("WRONG BYTES in piece %zu of thread %zu (pid %d): byte %zu is %u", i, which, getpid(), byte,
					    pieces[which][i][byte]);
}

typedef int create_function(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static void sleepers(struct area *area, create_function *create, void *(*work)(void *))
{
	pthread_t threads[SLEEPERS];
	MUST(pthread_barrier_init(&asleep, NULL, SLEEPERS + 1) == 0);
	for (size_t i = 0; i < KEYS; i++) MUST(pthread_key_create(&keys[i], NULL) == 0);
	pthread_mutex_lock(&door);
	for (uintptr_t i = 0; i < SLEEPERS; i++) MUST(create(&threads[i], NULL, work, (void *)i) == 0);
	pthread_barrier_wait(&asleep);
	for (int round = 0; round < 4; round++) {
		area_push_out(area);
		filler_walk();
		pid_t child = fork();
		if (child == 0) {
			check_pieces();
			area_check(area, 1);
			_exit(0);
		}
		must_succeed(child);
	}
	check_pieces();
	area_push_out(area);
	pthread_mutex_unlock(&door);
	for (uintptr_t i = 0; i < SLEEPERS; i++) {
		void *said;
		MUST(pthread_join(threads[i], &said) == 0 && said == (void *)i);
	}
	area_check(area, 1);
}

/* libc's own, whatever the name means in this program. */
static create_function *hidden_create(void)
{
	void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
	void *found = libc ? dlsym(libc, "pthread_create") : NULL;
	if (!found) lacks("pthread_create in libc.so.6");
	return (create_function *)found;
}

/* Lies between a thread's control block and what libc keeps of it. */
static __thread char pad[64 << 10];
static int *libcs_errno;
static int wake_up[2];

static void *fork_with_cold_errno(void *unused)
{
	memset(pad, 1, sizeof(pad));
	char byte;
	MUST(isalpha('a'));
	errno = 77;
	__atomic_store_n(&libcs_errno, &errno, __ATOMIC_RELEASE);
	MUST(read(wake_up[0], &byte, 1) == 1);
	pid_t child = fork();
	if (child == 0) _exit(errno == 77 && isalpha('a') && pad[sizeof(pad) / 2] == 1 ? 0 : 1);
	must_succeed(child);
	return unused;
}

static void thread_local(void)
{
	struct area area = area_new(MIB, 25, 1);
	for (int i = 0; i < 8; i++) {
		pthread_t thread;
		MUST(pipe(wake_up) == 0);
		MUST(pthread_create(&thread, NULL, fork_with_cold_errno, NULL) == 0);
		while (!__atomic_load_n(&libcs_errno, __ATOMIC_ACQUIRE)) sched_yield();
		sleep_ms(20);
		push_out((void *)((uintptr_t)libcs_errno / PAGE * PAGE), 1);
		libcs_errno = NULL;
		MUST(write(wake_up[1], "", 1) == 1);
		MUST(pthread_join(thread, NULL) == 0);
		close(wake_up[0]);
		close(wake_up[1]);
	}
	area_check(&area, 1);
}

/* As a stream that was closed, and its memory used for something else, while somebody goes through the list. */
static FILE closed = {._lock = (void *)16, ._chain = (FILE *)32};
static FILE *behind;

static void tear_streams(void)
{
	behind = stderr->_chain;
	stderr->_chain = &closed;
}

static void mend_streams(void) { stderr->_chain = behind; }

static void streams(struct area *area)
{
	MUST(pthread_atfork(tear_streams, mend_streams, mend_streams) == 0);
	for (int round = 0; round < 4; round++) {
		area_push_out(area);
		pid_t child = fork();
		if (child == 0) {
			area_check(area, 1);
			_exit(0);
		}
		must_succeed(child);
		area_check(area, 1);
	}
}

static void *sleeps(void *unused)
{
	pause();
	return unused;
}

/* Before it calls anybody libc looks at each stream's flags, in a child of several threads. */
static void straddling(struct area *area)
{
	/* Of a stream fork touches the chain, and what lies behind. */
	enum { CHAIN = 0x68, FLAGS = 16, STREAMS = 300, APART = 2 * PAGE };
	unsigned char *before = NULL;
	size_t bytes = 0;
	FILE *stream = NULL;
	for (size_t i = 0; i < STREAMS; i++) {
		/* Each has pages of its own. */
		bytes = APART + i * 16;
		before = malloc(bytes);
		MUST(before != NULL);
		memset(before, 0x5a, bytes);
		stream = fopen("/dev/null", "r");
		MUST(stream != NULL);
		size_t at = (uintptr_t)stream % PAGE;
		if (at > PAGE - CHAIN && at <= PAGE - FLAGS && before + bytes <= (unsigned char *)stream) break;
		stream = NULL;
	}
	MUST(stream != NULL && malloc(APART) != NULL);
	pthread_t sleeper;
	MUST(pthread_create(&sleeper, NULL, sleeps, NULL) == 0);
	for (int round = 0; round < 4; round++) {
		push_out((void *)((uintptr_t)stream / PAGE * PAGE), 1);
		area_push_out(area);
		pid_t child = fork();
		for (size_t i = 0; i < bytes; i++)
			if (before[i] != 0x5a) die("WRONG BYTES before the stream (pid %d): byte %zu is %u", getpid(), i, before[i]);
		area_check(area, 1);
		if (child == 0) _exit(0);
		must_succeed(child);
	}
}

int main(int argc, char **argv)
{
	size_t bytes = mode_is(argc, argv, "nested") || mode_is(argc, argv, "many") ? working_set() / 4 : working_set() / 2;
	struct area area = area_new(bytes, 4, 1);
	if (mode_is(argc, argv, "both_sides")) both_sides(&area);
	else if (mode_is(argc, argv, "many")) many(&area);
	else if (mode_is(argc, argv, "from_thread")) from_thread(&area);
	else if (mode_is(argc, argv, "nested")) {
		area_fill(&area, 100 - 5);
		nested(&area, 5);
	} else if (mode_is(argc, argv, "exec_loop")) exec_loop(&area);
	else if (mode_is(argc, argv, "outlives")) outlives(&area);
	else if (mode_is(argc, argv, "hidden")) sleepers(&area, hidden_create(), sleep_only);
	else if (mode_is(argc, argv, "thread_local")) thread_local();
	else if (mode_is(argc, argv, "streams")) streams(&area);
	else if (mode_is(argc, argv, "straddling")) straddling(&area);
	else if (mode_is(argc, argv, "keys")) sleepers(&area, pthread_create, sleep_with_keys);
	else die("both_sides | many | from_thread | nested | exec_loop | outlives | hidden | keys | streams | straddling | thread_local");
	return passed();
}
