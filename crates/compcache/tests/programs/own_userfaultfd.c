/* A program with a userfaultfd of its own: what it registers is its own business, and the rest is paged as ever. */
#include "trap.h"
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>

enum { PAGES = 512 };
static int fd;
static unsigned char *at;

static void *serve(void *unused)
{
	(void)unused;
	unsigned char *page = aligned_alloc(PAGE, PAGE);
	for (size_t served = 0; served < PAGES; served++) {
		struct uffd_msg message;
		ssize_t count = read(fd, &message, sizeof(message));
		MUST(count == (ssize_t)sizeof(message) && message.event == UFFD_EVENT_PAGEFAULT);
		unsigned char *where = (unsigned char *)(uintptr_t)(message.arg.pagefault.address & ~(uint64_t)(PAGE - 1));
		page_write(page, 43, (size_t)(where - at) / PAGE, 1);
		struct uffdio_copy copy = {.dst = (uintptr_t)where, .src = (uintptr_t)page, .len = PAGE};
		MUST(ioctl(fd, UFFDIO_COPY, &copy) == 0);
	}
	return NULL;
}

int main(void)
{
	struct area area = area_new(working_set() / 2, 44, 1);
	area_push_out(&area);
	fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	if (fd < 0) lacks("userfaultfd");
	struct uffdio_api api = {.api = UFFD_API};
	MUST(ioctl(fd, UFFDIO_API, &api) == 0);
	at = map_private(PAGES * PAGE);
	struct uffdio_register range = {.range = {(uintptr_t)at, PAGES * PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
	MUST(ioctl(fd, UFFDIO_REGISTER, &range) == 0);
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, serve, NULL) == 0);
	for (size_t page = 0; page < PAGES; page++) page_check(at + page * PAGE, 43, page, 1);
	pthread_join(thread, NULL);
	filler_walk();
	filler_walk();
	for (size_t page = 0; page < PAGES; page++) page_check(at + page * PAGE, 43, page, 1);
	area_check(&area, 1);
	return passed();
}
