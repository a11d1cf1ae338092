/* What engines and the pool's master wait with in loops, made to sleep (LD_PRELOAD).
 *
 * vLLM's workers poll around `sched_yield`, Mooncake's transfers around `check_task_status`, without
 * a pause: whoever reads from the pool or writes to it keeps a core busy until the other side has
 * sent or taken all. With cores to spare that costs nothing; here there are two for all.
 *
 * And they get more than their share. Since Linux 6.18 a thread that yields gives up the rest of its
 * slice, as virtual time: one that yields a million times a second runs far ahead, takes the queue's
 * mean with it, and whoever wakes is placed there, behind all that is busy. Without any yield, too,
 * two threads that polled for one engine's transfers had both cores for 16 s (6.18.44; schedstat):
 * the other engine, which was to serve them, the router and even kernel threads waited for up to
 * 6 s at a time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <time.h>

#define CHECK "_ZN8mooncake28TransferEngineOperationState17check_task_statusEv"

static void pause_50_us(void) {
    const struct timespec pause = {0, 50 * 1000};
    nanosleep(&pause, NULL);
}

int sched_yield(void) {
    pause_50_us();
    return 0;
}

/* mooncake::TransferEngineOperationState::check_task_status(), of the library that calls it: it is
 * loaded for itself alone, so RTLD_NEXT does not find it. */
void check_task_status(void *state) __asm__(CHECK);

void check_task_status(void *state) {
    static void (*check)(void *);
    if (check == NULL) {
        Dl_info caller;
        dladdr(__builtin_return_address(0), &caller);
        check = (void (*)(void *))dlsym(dlopen(caller.dli_fname, RTLD_LAZY | RTLD_NOLOAD), CHECK);
    }
    check(state);
    pause_50_us();
}
