/*
 * The kernel reads and writes buffers that are not there: it must wait for the page, never answer EFAULT or see zeroes.
 * Each call gets pages that were just made cold. Modes: files, sockets, pipes, waiting, paths, memory.
 * The second argument is a directory to write in.
 */
#include "trap.h"
#include <dirent.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/utsname.h>

static struct area area;
static size_t next_page, given, absent;
static const char *directory;

/*
 * The next run of cold pages. Their contents are of generation 1 until something is read into them. What was read ahead when
 * the run before was touched leaves again.
 */
static unsigned char *cold(size_t pages)
{
	MUST(next_page + pages <= area.pages);
	unsigned char *at = area.at + next_page * PAGE;
	next_page += pages;
	if (present_pages(at, pages) > (long)pages / 2) push_out(at, pages);
	long present = present_pages(at, pages);
	given += pages;
	if (present >= 0) absent += pages - (size_t)present;
	return at;
}

static size_t number(const unsigned char *at) { return (size_t)(at - area.at) / PAGE; }

static void restart(void)
{
	area_fill(&area, 1);
	next_page = 0;
	area_push_out(&area);
}

static int temporary(void)
{
	char path[512];
	snprintf(path, sizeof(path), "%s/trap-XXXXXX", directory);
	int fd = mkstemp(path);
	MUST(fd >= 0);
	unlink(path);
	return fd;
}

enum { RUN = 9 };

static void files(void)
{
	int fd = temporary();
	/* Out of evicted memory. */
	unsigned char *out = cold(RUN);
	MUST(write(fd, out + 100, RUN * PAGE - 100) == (ssize_t)(RUN * PAGE - 100));
	unsigned char *out2 = cold(RUN);
	MUST(pwrite(fd, out2, RUN * PAGE, 1 << 20) == (ssize_t)(RUN * PAGE));
	struct iovec *list = (struct iovec *)cold(1);
	unsigned char *part1 = cold(RUN), *part2 = cold(RUN);
	list[0] = (struct iovec){part1, RUN * PAGE};
	list[1] = (struct iovec){part2 + 1, RUN * PAGE - 1};
	push_out(list, 1);
	push_out(part1, 2 * RUN);
	MUST(pwritev(fd, list, 2, 2 << 20) == (ssize_t)(2 * RUN * PAGE - 1));
	/* Into evicted memory: the contents that were there are gone, the bytes around stay. */
	unsigned char *in = cold(RUN + 1);
	MUST(pread(fd, in + 100, RUN * PAGE - 100, 0) == (ssize_t)(RUN * PAGE - 100));
	MUST(memcmp(in + 100, out + 100, RUN * PAGE - 100) == 0);
	page_check(in + RUN * PAGE, area.tag, number(in) + RUN, 1);
	page_check(out, area.tag, number(out), 1);
	MUST(lseek(fd, 1 << 20, SEEK_SET) == 1 << 20);
	unsigned char *in2 = cold(RUN);
	MUST(read(fd, in2, RUN * PAGE) == (ssize_t)(RUN * PAGE));
	for (size_t i = 0; i < RUN; i++) page_check(in2 + i * PAGE, area.tag, number(out2) + i, 1);
	unsigned char *in3 = cold(RUN), *in4 = cold(RUN);
	struct iovec into[2] = {{in3, RUN * PAGE}, {in4 + 1, RUN * PAGE - 1}};
	MUST(preadv(fd, into, 2, 2 << 20) == (ssize_t)(2 * RUN * PAGE - 1));
	for (size_t i = 0; i < RUN; i++) page_check(in3 + i * PAGE, area.tag, number(part1) + i, 1);
	MUST(memcmp(in4 + 1, part2 + 1, RUN * PAGE - 1) == 0);
	close(fd);
}

static void *reader_thread(void *argument)
{
	int fd = *(int *)argument;
	unsigned char got[PAGE];
	uint64_t sum = 0;
	for (ssize_t count; (count = read(fd, got, sizeof(got))) != 0;) {
		MUST(count > 0);
		for (ssize_t i = 0; i < count; i++) sum = sum * 31 + got[i];
	}
	return (void *)(uintptr_t)sum;
}

static uint64_t sum_of(const unsigned char *at, size_t bytes)
{
	uint64_t sum = 0;
	for (size_t i = 0; i < bytes; i++) sum = sum * 31 + at[i];
	return sum;
}

static void through(int from, int to, bool socket)
{
	pthread_t thread;
	void *sum;
	unsigned char *out = cold(64);
	MUST(pthread_create(&thread, NULL, reader_thread, &from) == 0);
	for (size_t done = 0; done < 64 * PAGE;) {
		ssize_t count = socket ? send(to, out + done, 64 * PAGE - done, 0) : write(to, out + done, 64 * PAGE - done);
		MUST(count > 0);
		done += (size_t)count;
	}
	if (socket) shutdown(to, SHUT_WR);
	else close(to);
	pthread_join(thread, &sum);
	unsigned char expected[PAGE];
	uint64_t right = 0;
	for (size_t i = 0; i < 64; i++) {
		page_write(expected, area.tag, number(out) + i, 1);
		for (size_t byte = 0; byte < PAGE; byte++) right = right * 31 + expected[byte];
	}
	if ((uintptr_t)sum != right) die("WRONG BYTES out of evicted memory through a %s", socket ? "socket" : "pipe");
	MUST(sum_of(out, 64 * PAGE) == right);
}

static void sockets(void)
{
	int pair[2];
	MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	through(pair[0], pair[1], true);
	MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
	for (int round = 0; round < 20; round++) {
		/* Message headers, addresses and ancillary data lie in cold pages of their own. */
		unsigned char *out = cold(2), *in = cold(3);
		struct msghdr *header = (struct msghdr *)cold(1);
		struct iovec *vector = (struct iovec *)cold(1);
		struct cmsghdr *control = (struct cmsghdr *)cold(1);
		memset(header, 0, sizeof(*header));
		*vector = (struct iovec){out, 2 * PAGE};
		control->cmsg_len = CMSG_LEN(sizeof(int));
		control->cmsg_level = SOL_SOCKET;
		control->cmsg_type = SCM_RIGHTS;
		memcpy(CMSG_DATA(control), &pair[0], sizeof(int));
		header->msg_iov = vector;
		header->msg_iovlen = 1;
		header->msg_control = control;
		header->msg_controllen = CMSG_SPACE(sizeof(int));
		if (round % 5 == 0) push_out(out, 8);
		MUST(sendmsg(pair[1], header, 0) == (ssize_t)(2 * PAGE));
		*vector = (struct iovec){in + 5, 2 * PAGE};
		memset(control, 0, CMSG_SPACE(sizeof(int)));
		if (round % 5 == 1) push_out(out, 8);
		MUST(recvmsg(pair[0], header, 0) == (ssize_t)(2 * PAGE));
		MUST(memcmp(in + 5, out, 2 * PAGE) == 0);
		int passed_fd;
		memcpy(&passed_fd, CMSG_DATA(control), sizeof(int));
		MUST(control->cmsg_type == SCM_RIGHTS && fcntl(passed_fd, F_GETFD) >= 0);
		close(passed_fd);
		page_check(out, area.tag, number(out), 1);
		page_check(out + PAGE, area.tag, number(out) + 1, 1);
	}
}

static void *late_writer(void *argument)
{
	int fd = *(int *)argument;
	unsigned char page[PAGE];
	sleep_ms(100);
	for (size_t i = 0; i < 64; i++) {
		page_write(page, 99, i, 1);
		MUST(write(fd, page, PAGE) == (ssize_t)PAGE);
		if (i % 16 == 0) sleep_ms(20);
	}
	return NULL;
}

static void pipes(void)
{
	int pair[2];
	MUST(pipe(pair) == 0);
	through(pair[0], pair[1], false);
	MUST(pipe(pair) == 0);
	/* The reader already sleeps in the kernel with its buffer when the bytes come; meanwhile the buffer gets cold. */
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, late_writer, &pair[1]) == 0);
	unsigned char *in = cold(64);
	for (size_t done = 0; done < 64 * PAGE;) {
		ssize_t count = read(pair[0], in + done, 64 * PAGE - done);
		MUST(count > 0);
		done += (size_t)count;
	}
	pthread_join(thread, NULL);
	for (size_t i = 0; i < 64; i++) page_check(in + i * PAGE, 99, i, 1);
}

static void waiting(void)
{
	for (int round = 0; round < 10; round++) {
		int event = eventfd(1, 0), set = epoll_create1(0);
		MUST(event >= 0 && set >= 0);
		struct pollfd *polled = (struct pollfd *)cold(1);
		struct timespec *patience = (struct timespec *)cold(1);
		sigset_t *mask = (sigset_t *)cold(1);
		struct epoll_event *wanted = (struct epoll_event *)cold(1), *got = (struct epoll_event *)cold(2);
		fd_set *selected = (fd_set *)cold(1);
		struct timeval *until = (struct timeval *)cold(1);
		uint64_t *value = (uint64_t *)cold(1);
		*polled = (struct pollfd){event, POLLIN, 0};
		*patience = (struct timespec){1, 0};
		sigemptyset(mask);
		*wanted = (struct epoll_event){.events = EPOLLIN, .data.u64 = 0x1122334455667788u};
		FD_ZERO(selected);
		FD_SET(event, selected);
		*until = (struct timeval){1, 0};
		push_out(polled, 9);
		MUST(ppoll(polled, 1, patience, mask) == 1 && polled->revents == POLLIN);
		MUST(epoll_ctl(set, EPOLL_CTL_ADD, event, wanted) == 0);
		MUST(epoll_wait(set, got, 300, 1000) == 1 && got->data.u64 == 0x1122334455667788u && got->events == EPOLLIN);
		MUST(select(event + 1, selected, NULL, NULL, until) == 1 && FD_ISSET(event, selected));
		MUST(read(event, value, 8) == 8 && *value == 1);
		close(event);
		close(set);
	}
}

static void paths(void)
{
	char *name = (char *)cold(1), *link = (char *)cold(1), *target = (char *)cold(1), *here = (char *)cold(2);
	snprintf(name, PAGE, "%s/trap-%d", directory, getpid());
	snprintf(link, PAGE, "%s/trap-link-%d", directory, getpid());
	push_out(name, 5);
	int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
	MUST(fd >= 0);
	MUST(symlink(name, link) == 0);
	push_out(name, 5);
	MUST(readlink(link, target, PAGE) == (ssize_t)strlen(name) && strncmp(target, name, strlen(name)) == 0);
	struct stat *facts = (struct stat *)cold(1);
	MUST(stat(name, facts) == 0 && facts->st_size == 0 && S_ISREG(facts->st_mode));
	MUST(getcwd(here, 2 * PAGE) == here && here[0] == '/');
	int tree = open("/usr/bin", O_RDONLY | O_DIRECTORY);
	MUST(tree >= 0);
	long entries = 0, again = 0;
	for (;;) {
		unsigned char *list = cold(4);
		long count = syscall(SYS_getdents64, tree, list, 4 * PAGE);
		MUST(count >= 0);
		if (count == 0) break;
		for (long at = 0; at < count; entries++) at += ((struct dirent *)(void *)(list + at))->d_reclen;
	}
	close(tree);
	DIR *usual = opendir("/usr/bin");
	while (readdir(usual)) again++;
	closedir(usual);
	MUST(entries == again && entries > 10);
	close(fd);
	MUST(unlink(link) == 0 && unlink(name) == 0);
}

static void memory(void)
{
	struct timespec *now = (struct timespec *)cold(1);
	MUST(syscall(SYS_clock_gettime, CLOCK_MONOTONIC, now) == 0 && now->tv_sec > 0);
	struct utsname *names = (struct utsname *)cold(1);
	MUST(uname(names) == 0 && strcmp(names->sysname, "Linux") == 0);
	unsigned char *random = cold(4);
	MUST(getrandom(random, 4 * PAGE, 0) == (ssize_t)(4 * PAGE));
	MUST(page_compare(random + PAGE, area.tag, number(random) + 1, 1) != WORDS && !page_is_zero(random + PAGE));
	struct sigaction *action = (struct sigaction *)cold(1), *old = (struct sigaction *)cold(1);
	memset(action, 0, sizeof(*action));
	action->sa_handler = SIG_IGN;
	push_out(action, 2);
	MUST(sigaction(SIGUSR2, action, NULL) == 0 && sigaction(SIGUSR2, NULL, old) == 0 && old->sa_handler == SIG_IGN);
	/* This process reads itself as another one would. */
	for (int round = 0; round < 4; round++) {
		unsigned char *source = cold(8), *target = cold(8);
		struct iovec from = {source, 8 * PAGE}, to = {target, 8 * PAGE};
		if (round % 2) MUST(process_vm_readv(getpid(), &to, 1, &from, 1, 0) == (ssize_t)(8 * PAGE));
		else MUST(process_vm_writev(getpid(), &from, 1, &to, 1, 0) == (ssize_t)(8 * PAGE));
		for (size_t i = 0; i < 8; i++) page_check(target + i * PAGE, area.tag, number(source) + i, 1);
	}
	/* copy_file_range, sendfile and splice move no user memory; a file mapping does. */
	int fd = temporary();
	MUST(ftruncate(fd, 32 * (off_t)PAGE) == 0);
	unsigned char *mapped = mmap(NULL, 32 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(mapped != MAP_FAILED);
	unsigned char *source = cold(32);
	memcpy(mapped, source, 32 * PAGE);
	unsigned char *target = cold(32);
	MUST(pread(fd, target, 32 * PAGE, 0) == (ssize_t)(32 * PAGE));
	for (size_t i = 0; i < 32; i++) page_check(target + i * PAGE, area.tag, number(source) + i, 1);
	close(fd);
}

int main(int argc, char **argv)
{
	directory = argc > 2 ? argv[2] : "/tmp";
	struct area kept = area_new(working_set() / 4, 8, 1);
	area = area_new(4 * MIB, 25, 1);
	for (int round = 0; round < 3; round++) {
		restart();
		if (mode_is(argc, argv, "files")) files();
		else if (mode_is(argc, argv, "sockets")) sockets();
		else if (mode_is(argc, argv, "pipes")) pipes();
		else if (mode_is(argc, argv, "waiting")) waiting();
		else if (mode_is(argc, argv, "paths")) paths();
		else if (mode_is(argc, argv, "memory")) memory();
		else die("files | sockets | pipes | waiting | paths | memory [DIRECTORY]");
	}
	area_check(&kept, 1);
	if (expects_eviction() && absent < given / 8) die("VACUOUS: of %zu pages given to the kernel %zu were absent", given, absent);
	return passed();
}
