/* Large arrays of the program itself, with and without initial contents, and thread-local ones: evicted or not, right. */
#include "trap.h"

enum { BYTES = 12 << 20 };
static unsigned char zeroed[BYTES] __attribute__((aligned(4096)));
static unsigned char initialised[2 << 20] __attribute__((aligned(4096))) = {1};
static _Thread_local unsigned char local[1 << 20] __attribute__((aligned(4096)));

static void *work(void *argument)
{
	struct area mine = area_over(local, sizeof(local), (uintptr_t)argument);
	for (uint64_t round = 1; round < 5; round++) {
		area_fill(&mine, round);
		filler_walk();
		area_check(&mine, round);
	}
	return NULL;
}

int main(void)
{
	struct area one = area_over(zeroed, sizeof(zeroed), 45), two = area_over(initialised, sizeof(initialised), 46);
	MUST(initialised[0] == 1 && page_is_zero(initialised + PAGE));
	pthread_t threads[3];
	for (uintptr_t i = 0; i < 3; i++) MUST(pthread_create(&threads[i], NULL, work, (void *)(i + 47)) == 0);
	must_be_zero(zeroed, sizeof(zeroed), "static memory before its first use");
	for (uint64_t round = 1; round < 4; round++) {
		area_fill(&one, round);
		area_fill(&two, round);
		filler_walk();
		filler_walk();
		area_check(&one, round);
		area_check(&two, round);
	}
	for (size_t i = 0; i < 3; i++) pthread_join(threads[i], NULL);
	return passed();
}
