/*
 * Memory that is not the process's alone, beside memory that is.
 *
 *   anonymous  MAP_SHARED memory of a parent and its children: all see every write
 *   memfd      the same object mapped twice, shared and private
 *   private    a file mapped privately and changed: neither the file nor the changes get lost
 *   vm_clone   a second process in the same address space (CLONE_VM without CLONE_THREAD)
 */
#include "trap.h"

static struct area area;

static void anonymous(void)
{
	size_t bytes = working_set() / 4;
	struct area shared = area_over(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), bytes, 36);
	MUST(shared.at != MAP_FAILED);
	area_fill(&shared, 1);
	filler_walk();
	for (uint64_t round = 1; round < 4; round++) {
		pid_t child = fork();
		if (child == 0) {
			area_check(&shared, round);
			area_fill(&shared, round + 1);
			filler_walk();
			area_check(&area, 1);
			_exit(0);
		}
		must_succeed(child);
		area_check(&shared, round + 1);
	}
}

static void memory_file(void)
{
	size_t bytes = working_set() / 4;
	int fd = memfd_create("trap", 0);
	MUST(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
	struct area one = area_over(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), bytes, 37);
	struct area two = area_over(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), bytes, 37);
	struct area own = area_over(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0), bytes, 37);
	MUST(one.at != MAP_FAILED && two.at != MAP_FAILED && own.at != MAP_FAILED);
	area_fill(&one, 1);
	area_check(&two, 1);
	area_check(&own, 1);
	for (size_t page = 0; page < own.pages; page += 2) page_write(own.at + page * PAGE, 37, page, 5);
	filler_walk();
	filler_walk();
	area_fill(&two, 2);
	area_check(&one, 2);
	for (size_t page = 0; page < own.pages; page++) page_check(own.at + page * PAGE, 37, page, page % 2 ? 2 : 5);
	/* A hole punched in the object reads as zeroes through all three, but for the private copies. */
	MUST(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)(bytes / 2)) == 0);
	must_be_zero(one.at, bytes / 2, "a hole in a shared object");
	for (size_t page = 0; page < own.pages; page += 2) page_check(own.at + page * PAGE, 37, page, 5);
}

static void private_file(const char *directory)
{
	char path[512];
	snprintf(path, sizeof(path), "%s/trap-XXXXXX", directory);
	int fd = mkstemp(path);
	MUST(fd >= 0);
	unlink(path);
	size_t bytes = working_set() / 4;
	MUST(ftruncate(fd, (off_t)bytes) == 0);
	unsigned char page_of_file[PAGE];
	for (size_t page = 0; page < bytes / PAGE; page++) {
		page_write(page_of_file, 38, page, 1);
		MUST(pwrite(fd, page_of_file, PAGE, (off_t)(page * PAGE)) == (ssize_t)PAGE);
	}
	struct area mapped = area_over(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0), bytes, 38);
	MUST(mapped.at != MAP_FAILED);
	area_check(&mapped, 1);
	for (uint64_t round = 1; round < 4; round++) {
		for (size_t page = 0; page < mapped.pages; page += 3) page_write(mapped.at + page * PAGE, 38, page, round + 1);
		filler_walk();
		filler_walk();
		for (size_t page = 0; page < mapped.pages; page++) page_check(mapped.at + page * PAGE, 38, page, page % 3 ? 1 : round + 1);
	}
	/* Discarded, the changes are gone and the file shows through. */
	MUST(madvise(mapped.at, bytes, MADV_DONTNEED) == 0);
	area_check(&mapped, 1);
	for (size_t page = 0; page < mapped.pages; page++) {
		MUST(pread(fd, page_of_file, PAGE, (off_t)(page * PAGE)) == (ssize_t)PAGE);
		page_check(page_of_file, 38, page, 1);
	}
}

static int second_process(void *unused)
{
	(void)unused;
	for (size_t page = 0; page < area.pages; page++) page_check(area.at + page * PAGE, area.tag, page, 1);
	for (size_t page = 0; page < area.pages; page++) page_write(area.at + page * PAGE, area.tag, page, 2);
	return 0;
}

static void same_space(void)
{
	unsigned char *stack = map_private(MIB);
	area_push_out(&area);
	int child = clone(second_process, stack + MIB, CLONE_VM | SIGCHLD, NULL);
	for (int i = 0; i < 3; i++) filler_walk();
	must_succeed(child);
	area_push_out(&area);
	area_check(&area, 2);
	area_fill(&area, 1);
}

int main(int argc, char **argv)
{
	area = area_new(working_set() / 4, 35, 1);
	area_push_out(&area);
	if (mode_is(argc, argv, "anonymous")) anonymous();
	else if (mode_is(argc, argv, "memfd")) memory_file();
	else if (mode_is(argc, argv, "private")) private_file(argc > 2 ? argv[2] : "/tmp");
	else if (mode_is(argc, argv, "vm_clone")) same_space();
	else die("anonymous | memfd | private | vm_clone");
	area_check(&area, 1);
	return passed();
}
