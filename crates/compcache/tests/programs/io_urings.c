/*
 * io_uring reads and writes evicted memory from the kernel's own threads, and pins registered buffers for good.
 * Raw system calls: no library is needed. The second argument is a directory to write in.
 *
 *   plain       IORING_OP_READ and IORING_OP_WRITE, many in flight
 *   registered  the same with registered (pinned) buffers
 */
#include "trap.h"
#include <linux/io_uring.h>
#include <sys/uio.h>

enum { DEPTH = 32, RUN = 8 };

static int ring;
static unsigned *submit_tail, *submit_mask, *submit_array, *done_head, *done_tail, *done_mask;
static struct io_uring_sqe *entries;
static struct io_uring_cqe *results;

static void set_up(void)
{
	struct io_uring_params params = {0};
	ring = (int)syscall(SYS_io_uring_setup, DEPTH, &params);
	if (ring < 0) lacks("io_uring");
	size_t submit_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
	size_t done_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
	unsigned char *submit = mmap(NULL, submit_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	unsigned char *done = mmap(NULL, done_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
	entries = mmap(NULL, params.sq_entries * sizeof(*entries), PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
	MUST(submit != MAP_FAILED && done != MAP_FAILED && (void *)entries != MAP_FAILED);
	submit_tail = (unsigned *)(submit + params.sq_off.tail);
	submit_mask = (unsigned *)(submit + params.sq_off.ring_mask);
	submit_array = (unsigned *)(submit + params.sq_off.array);
	done_head = (unsigned *)(done + params.cq_off.head);
	done_tail = (unsigned *)(done + params.cq_off.tail);
	done_mask = (unsigned *)(done + params.cq_off.ring_mask);
	results = (struct io_uring_cqe *)(done + params.cq_off.cqes);
}

static void put(int operation, int fd, unsigned char *at, off_t offset, int buffer)
{
	unsigned tail = *submit_tail, index = tail & *submit_mask;
	struct io_uring_sqe *entry = &entries[index];
	memset(entry, 0, sizeof(*entry));
	entry->opcode = (unsigned char)operation;
	entry->fd = fd;
	entry->addr = (uintptr_t)at;
	entry->len = RUN * PAGE;
	entry->off = (uint64_t)offset;
	entry->buf_index = (unsigned short)buffer;
	if (offset / (off_t)(RUN * PAGE) % 2) entry->flags = IOSQE_ASYNC;
	submit_array[index] = index;
	__atomic_store_n(submit_tail, tail + 1, __ATOMIC_RELEASE);
}

static void submit_and_wait(unsigned count)
{
	unsigned seen = 0;
	int submitted = (int)syscall(SYS_io_uring_enter, ring, count, count, IORING_ENTER_GETEVENTS, NULL, 0);
	MUST(submitted == (int)count);
	while (seen < count) {
		unsigned head = *done_head;
		if (head == __atomic_load_n(done_tail, __ATOMIC_ACQUIRE)) {
			MUST(syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) >= 0);
			continue;
		}
		int result = results[head & *done_mask].res;
		if (result != (int)(RUN * PAGE)) die("io_uring transferred %d of %zu bytes", result, RUN * PAGE);
		__atomic_store_n(done_head, head + 1, __ATOMIC_RELEASE);
		seen++;
	}
}

int main(int argc, char **argv)
{
	bool registered = mode_is(argc, argv, "registered");
	if (!registered && !mode_is(argc, argv, "plain")) die("plain | registered [DIRECTORY]");
	set_up();
	char path[512];
	snprintf(path, sizeof(path), "%s/trap-uring-%d", argc > 2 ? argv[2] : "/tmp", getpid());
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
	MUST(fd >= 0);
	int direct = open(path, O_RDWR | O_DIRECT);
	if (direct < 0) direct = fd;
	unlink(path);

	struct area kept = area_new(working_set() / 4, 8, 1);
	struct area from = area_new(DEPTH * RUN * PAGE, 80, 1), to = area_new(DEPTH * RUN * PAGE, 81, 1);
	if (registered) {
		struct iovec buffers[2] = {{from.at, from.pages * PAGE}, {to.at, to.pages * PAGE}};
		area_push_out(&from);
		if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, buffers, 2) != 0) lacks("registered buffers");
	}
	int write_with = registered ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE;
	int read_with = registered ? IORING_OP_READ_FIXED : IORING_OP_READ;
	for (uint64_t round = 1; round < 9; round++) {
		int file = round % 2 ? fd : direct;
		if (!registered) area_push_out(&from);
		else filler_walk();
		for (unsigned i = 0; i < DEPTH; i++) put(write_with, file, from.at + i * RUN * PAGE, (off_t)(i * RUN * PAGE), 0);
		submit_and_wait(DEPTH);
		if (!registered) area_push_out(&to);
		else filler_walk();
		for (unsigned i = 0; i < DEPTH; i++) put(read_with, file, to.at + i * RUN * PAGE, (off_t)(i * RUN * PAGE), 1);
		submit_and_wait(DEPTH);
		filler_walk();
		for (size_t page = 0; page < to.pages; page++) page_check(to.at + page * PAGE, 80, page, round);
		area_check(&from, round);
		area_fill(&from, round + 1);
	}
	area_check(&kept, 1);
	return passed();
}
