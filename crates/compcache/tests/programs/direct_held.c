/*
 * A direct read whose answer is a while on its way: its pages look cold long before it comes, and the kernel holds on to them without
 * pinning them where the file is on NFS (not so on a disk). For a machine of its own: takes its loopback device down meanwhile, by which the server is to be reached.
 * The first argument is a directory on that file system.
 */
#include "trap.h"
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

enum { PAGES = 1024 };
static const char *directory;
static unsigned char *buffer;
static atomic_bool has_come;

static void loopback(bool up)
{
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	struct ifreq request = {.ifr_name = "lo"};
	MUST(fd >= 0 && ioctl(fd, SIOCGIFFLAGS, &request) == 0);
	request.ifr_flags = (short)(up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
	MUST(ioctl(fd, SIOCSIFFLAGS, &request) == 0);
	close(fd);
}

static void *reads(void *fd)
{
	MUST(pread((int)(intptr_t)fd, buffer, PAGES * PAGE, 0) == (ssize_t)(PAGES * PAGE));
	has_come = true;
	return NULL;
}

int main(int argc, char **argv)
{
	directory = argc > 1 ? argv[1] : "/tmp";
	char path[512];
	snprintf(path, sizeof(path), "%s/trap-held-%d", directory, getpid());
	buffer = map_private(PAGES * PAGE);
	for (size_t i = 0; i < PAGES; i++) page_write(buffer + i * PAGE, 5, i, 1);
	int plain = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
	MUST(plain >= 0 && write(plain, buffer, PAGES * PAGE) == (ssize_t)(PAGES * PAGE) && fsync(plain) == 0);
	close(plain);
	filler_walk();
	int fd = open(path, O_RDONLY | O_DIRECT);
	if (fd < 0) lacks("O_DIRECT");
	memset(buffer, 0x3c, PAGES * PAGE);
	loopback(false);
	pthread_t thread;
	MUST(pthread_create(&thread, NULL, reads, (void *)(intptr_t)fd) == 0);
	/* Those that leave are enough when they are a quarter; where none may, the time is up before. */
	double until = seconds_now() + 5;
	long present;
	do filler_walk();
	while ((present = present_pages(buffer, PAGES)) > (long)PAGES * 3 / 4 && seconds_now() < until);
	dprintf(2, "%ld of %d pages are there while the answer is on its way\n", present, PAGES);
	if (has_come) die("the answer did not wait");
	loopback(true);
	pthread_join(thread, NULL);
	for (size_t i = 0; i < PAGES; i++) page_check(buffer + i * PAGE, 5, i, 1);
	unlink(path);
	return passed();
}
