// Takes MIB of memory that does not compress, says so, and keeps touching it until it is ended.
#include <stdio.h>
#include <stdlib.h>
#include <stdint.h>
#include <sys/mman.h>

int main(int argc, char **argv)
{
	size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 10) << 20 : 0;
	uint64_t state = 88172645463325252ull;
	uint64_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (bytes == 0 || memory == MAP_FAILED) {
		perror("hog");
		return 2;
	}
	for (size_t at = 0; at < bytes / 8; at++) {
		state ^= state << 13, state ^= state >> 7, state ^= state << 17;
		memory[at] = state;
	}
	puts("filled");
	fflush(stdout);
	for (uint64_t sum = 0;; sum++)
		for (size_t at = 0; at < bytes / 8; at += 512)
			memory[at] += sum;
}
