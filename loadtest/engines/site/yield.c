/* `sched_yield` of engines and of the pool's master, in place of the C library's (LD_PRELOAD).
 *
 * vLLM's workers and Mooncake's transfers poll in loops around it. Since Linux 6.18 a thread that
 * yields gives up the rest of its slice, as virtual time: one that yields a million times a second
 * runs far ahead, takes the queue's mean with it, and whoever wakes is placed there, behind all that
 * is busy. Seen with 6.18.44 on two cores and other load: a process that slept 20 ms at a time woke
 * up to 7 s late, a router's deadlines of 25 ms with it, and reads from the pool took up to 60 s.
 */
#include <time.h>

int sched_yield(void) {
    const struct timespec pause = {0, 50 * 1000};
    nanosleep(&pause, 0);
    return 0;
}
