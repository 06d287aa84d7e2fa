/*
 * The kernel keeps a reference to a page after the call has returned: a pager that reuses frames must not give such a
 * frame to other contents.
 *
 *   vmsplice   pages lent to a pipe are read from it much later
 *   written    what is written to such pages while they are lent is what the pipe's reader gets
 *   again      as written, by two threads, where others were lent and unmapped just before, while a third has pages leave
 *   zerocopy   pages lent to a socket with MSG_ZEROCOPY are received much later
 *   nowhere    a vector that is not there is an error
 */
#include "trap.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef SO_ZEROCOPY
#define SO_ZEROCOPY 60
#endif
#ifndef MSG_ZEROCOPY
#define MSG_ZEROCOPY 0x4000000
#endif

enum { LENT = 16 };

static void lend_to_pipe(bool write_while_lent)
{
	for (uint64_t round = 1; round < 9; round++) {
		int pair[2];
		MUST(pipe(pair) == 0);
		struct area area = area_new(LENT * PAGE, 40, round);
		if (round % 2) area_push_out(&area);
		struct iovec vector = {area.at, LENT * PAGE};
		ssize_t lent = vmsplice(pair[1], &vector, 1, 0);
		if (lent < 0) lacks("vmsplice");
		MUST(lent == (ssize_t)(LENT * PAGE));
		for (int i = 0; i < 3; i++) filler_walk();
		uint64_t last = write_while_lent ? round + 100 : round;
		if (write_while_lent) area_fill(&area, last);
		unsigned char got[LENT * PAGE];
		for (size_t done = 0; done < sizeof(got);) {
			ssize_t count = read(pair[0], got + done, sizeof(got) - done);
			MUST(count > 0);
			done += (size_t)count;
		}
		for (size_t page = 0; page < LENT; page++) page_check(got + page * PAGE, 40, page, last);
		area_check(&area, last);
		munmap(area.at, LENT * PAGE);
		close(pair[0]);
		close(pair[1]);
	}
}

static void *walk(void *stop)
{
	while (!atomic_load((atomic_bool *)stop)) filler_walk();
	return NULL;
}

static void *lend_one_after_the_other(void *tag)
{
	int pair[2];
	MUST(pipe(pair) == 0);
	for (uint64_t round = 1; round < 300; round++) {
		struct area area = area_new(LENT * PAGE, (uint64_t)(uintptr_t)tag, round);
		struct iovec vector = {area.at, LENT * PAGE};
		ssize_t lent = vmsplice(pair[1], &vector, 1, 0);
		if (lent < 0) lacks("vmsplice");
		MUST(lent == (ssize_t)(LENT * PAGE));
		/* Time to leave. */
		sleep_ms(round % 8 ? 1 : 100);
		area_fill(&area, round + 1000);
		unsigned char got[LENT * PAGE];
		for (size_t done = 0; done < sizeof(got);) {
			ssize_t count = read(pair[0], got + done, sizeof(got) - done);
			MUST(count > 0);
			done += (size_t)count;
		}
		for (size_t page = 0; page < LENT; page++) page_check(got + page * PAGE, area.tag, page, round + 1000);
		area_check(&area, round + 1000);
		munmap(area.at, LENT * PAGE);
	}
	return NULL;
}

static void lend_again_and_again(void)
{
	atomic_bool stop = false;
	pthread_t walker, lenders[2];
	MUST(pthread_create(&walker, NULL, walk, &stop) == 0);
	for (uintptr_t i = 0; i < 2; i++)
		MUST(pthread_create(&lenders[i], NULL, lend_one_after_the_other, (void *)(42 + i)) == 0);
	for (int i = 0; i < 2; i++) MUST(pthread_join(lenders[i], NULL) == 0);
	atomic_store(&stop, true);
	MUST(pthread_join(walker, NULL) == 0);
}

static void lend_to_socket(void)
{
	int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof(address);
	if (bind(listener, (struct sockaddr *)&address, length) != 0) lacks("a loopback network");
	MUST(listen(listener, 1) == 0 && getsockname(listener, (struct sockaddr *)&address, &length) == 0);
	int out = socket(AF_INET, SOCK_STREAM, 0);
	if (setsockopt(out, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof(one)) != 0) lacks("SO_ZEROCOPY");
	MUST(connect(out, (struct sockaddr *)&address, length) == 0);
	int in = accept(listener, NULL, NULL);
	MUST(in >= 0);
	for (uint64_t round = 1; round < 9; round++) {
		struct area area = area_new(LENT * PAGE, 41, round);
		if (round % 2) area_push_out(&area);
		ssize_t sent = send(out, area.at, LENT * PAGE, MSG_ZEROCOPY);
		if (sent < 0) lacks("MSG_ZEROCOPY");
		for (int i = 0; i < 3; i++) filler_walk();
		unsigned char got[LENT * PAGE];
		for (ssize_t done = 0; done < sent;) {
			ssize_t count = read(in, got + done, (size_t)(sent - done));
			MUST(count > 0);
			done += count;
		}
		for (size_t page = 0; page < (size_t)sent / PAGE; page++) page_check(got + page * PAGE, 41, page, round);
		area_check(&area, round);
	}
}

static void lend_from_nowhere(void)
{
	int pair[2];
	struct area area = area_new(MIB, 44, 1);
	area_push_out(&area);
	MUST(pipe(pair) == 0);
	struct iovec *volatile nowhere = (struct iovec *)8;
	MUST(vmsplice(pair[1], nowhere, 1, 0) < 0 && errno == EFAULT);
	area_check(&area, 1);
}

int main(int argc, char **argv)
{
	if (mode_is(argc, argv, "vmsplice")) lend_to_pipe(false);
	else if (mode_is(argc, argv, "written")) lend_to_pipe(true);
	else if (mode_is(argc, argv, "again")) lend_again_and_again();
	else if (mode_is(argc, argv, "zerocopy")) lend_to_socket();
	else if (mode_is(argc, argv, "nowhere")) lend_from_nowhere();
	else die("vmsplice | written | again | zerocopy | nowhere");
	return passed();
}
