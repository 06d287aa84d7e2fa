/*
 * O_DIRECT reads and writes in flight from many threads, out of and into memory that is evicted and comes back: the
 * device transfers to a frame, so that frame must not be given to anybody else meanwhile.
 * The first argument is a directory on a file system with direct I/O.
 */
#include "trap.h"

enum { THREADS = 6, RUN = 16, RUNS = 24 };
static const char *directory;
static double until;

static void *work(void *argument)
{
	uint64_t tag = (uintptr_t)argument;
	char path[512];
	snprintf(path, sizeof(path), "%s/trap-direct-%d-%ju", directory, getpid(), (uintmax_t)tag);
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT, 0600);
	if (fd < 0) lacks("O_DIRECT");
	unlink(path);
	struct area area = area_new(RUNS * RUN * PAGE, tag, 0);
	uint64_t known[RUNS] = {0}, on_disk[RUNS];
	memset(on_disk, 0xff, sizeof(on_disk));
	for (uint64_t step = 1; seconds_now() < until; step++) {
		uint64_t random = mix(tag << 32 | step);
		size_t run = random % RUNS;
		unsigned char *at = area.at + run * RUN * PAGE;
		off_t offset = (off_t)(run * RUN * PAGE);
		if (on_disk[run] != ~(uint64_t)0 && (random >> 16) % 2) {
			/* Junk first, so that a transfer that went elsewhere is seen. */
			if ((random >> 20) % 2) memset(at, 0x3c, RUN * PAGE);
			MUST(pread(fd, at, RUN * PAGE, offset) == (ssize_t)(RUN * PAGE));
			known[run] = on_disk[run];
		} else if ((random >> 24) % 2) {
			for (size_t i = 0; i < RUN; i++) page_write(at + i * PAGE, tag, run * RUN + i, step);
			known[run] = step;
		} else {
			MUST(pwrite(fd, at, RUN * PAGE, offset) == (ssize_t)(RUN * PAGE));
			on_disk[run] = known[run];
		}
		size_t other = (random >> 32) % RUNS;
		for (size_t i = 0; i < RUN; i++) page_check(at + i * PAGE, tag, run * RUN + i, known[run]);
		for (size_t i = 0; i < RUN; i++) page_check(area.at + (other * RUN + i) * PAGE, tag, other * RUN + i, known[other]);
	}
	/* What is on the disk is right too. */
	unsigned char *fresh = map_private(RUN * PAGE);
	for (size_t run = 0; run < RUNS; run++) {
		if (on_disk[run] == ~(uint64_t)0) continue;
		MUST(pread(fd, fresh, RUN * PAGE, (off_t)(run * RUN * PAGE)) == (ssize_t)(RUN * PAGE));
		for (size_t i = 0; i < RUN; i++) page_check(fresh + i * PAGE, tag, run * RUN + i, on_disk[run]);
	}
	close(fd);
	return NULL;
}

int main(int argc, char **argv)
{
	directory = argc > 1 ? argv[1] : "/tmp";
	struct area kept = area_new(working_set() / 4, 8, 1);
	filler_walk();
	until = seconds_now() + 3;
	pthread_t threads[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++) MUST(pthread_create(&threads[i], NULL, work, (void *)(i + 70)) == 0);
	while (seconds_now() < until) filler_walk();
	for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
	area_check(&kept, 1);
	return passed();
}
