/*
 * A program that replaces itself, again and again, each time with memory that is evicted at that moment.
 *
 *   main    from the main thread
 *   thread  from another thread, while more of them are writing
 */
#include "trap.h"

static struct area area;
static char **arguments;

static void *busy(void *argument)
{
	struct area mine = area_new(working_set() / 8, (uintptr_t)argument, 0);
	for (uint64_t round = 0;; round++) {
		area_check(&mine, round);
		area_fill(&mine, round + 1);
	}
	return NULL;
}

static void *again(void *unused)
{
	(void)unused;
	execv("/proc/self/exe", arguments);
	die("execv: errno %d", errno);
}

int main(int argc, char **argv)
{
	bool from_thread = mode_is(argc, argv, "thread");
	if (!from_thread && !mode_is(argc, argv, "main")) die("main | thread [COUNT]");
	unsigned long count = argc > 2 ? strtoul(argv[2], NULL, 10) : 8;
	area = area_new(working_set() / 2, 33, 1);
	area_push_out(&area);
	for (size_t page = count; page < area.pages; page += 9) page_check(area.at + page * PAGE, 33, page, 1);
	if (count == 0) {
		area_check(&area, 1);
		return passed();
	}
	char left[32];
	snprintf(left, sizeof(left), "%lu", count - 1);
	char *list[] = {argv[0], argv[1], left, NULL};
	arguments = list;
	if (from_thread) {
		pthread_t threads[3];
		for (uintptr_t i = 0; i < 2; i++) MUST(pthread_create(&threads[i], NULL, busy, (void *)(i + 110)) == 0);
		sleep_ms(20);
		MUST(pthread_create(&threads[2], NULL, again, NULL) == 0);
		for (;;) sleep_ms(1000);
	}
	again(NULL);
}
