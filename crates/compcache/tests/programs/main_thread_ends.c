/* The main thread leaves with pthread_exit; the others go on, and the last one ends the process. */
#include "trap.h"

enum { THREADS = 4, ROUNDS = 3 };
static atomic_int running = THREADS;

static void *work(void *argument)
{
	uint64_t tag = (uintptr_t)argument;
	struct area area = area_new(working_set() / THREADS, tag, 0);
	for (uint64_t round = 0; round < ROUNDS; round++) {
		area_check(&area, round);
		area_fill(&area, round + 1);
		sleep_ms(20);
	}
	area_push_out(&area);
	area_check(&area, ROUNDS);
	if (atomic_fetch_sub(&running, 1) == 1) exit(passed());
	return NULL;
}

int main(void)
{
	for (uintptr_t i = 0; i < THREADS; i++) {
		pthread_t thread;
		MUST(pthread_create(&thread, NULL, work, (void *)(i + 10)) == 0);
		MUST(pthread_detach(thread) == 0);
	}
	pthread_exit(NULL);
}
