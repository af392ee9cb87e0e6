/* Whose turn it is.
 *
 * The lanes that any thread may drive wait in a queue. One owner leads: it
 * takes the first lane, drives it by a batch and puts it at the end, until its
 * own lane has left the queue. The other owners sleep until their lanes have
 * left it or the lead is free. */
#include <pthread.h>
#include <time.h>

#include "lanes_impl.h"

struct cer_lanes {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a lane has left, or nobody leads */
    bool led;
    cer_lane *first, **last; /* the queue */
    size_t n;                /* in it or held */
    uint64_t steps;
};

cer_status
cer_lanes_new(cer_lanes **out, cer_error *err)
{
    cer_lanes *l = cer_calloc(1, sizeof *l);
    pthread_condattr_t clock;
    bool made = false;

    *out = NULL;
    if (l == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for lanes");
    l->last = &l->first;
    if (pthread_condattr_init(&clock) == 0) {
        made = pthread_condattr_setclock(&clock, CLOCK_MONOTONIC) == 0 &&
               pthread_cond_init(&l->changed, &clock) == 0;
        (void)pthread_condattr_destroy(&clock);
    }
    if (made && pthread_mutex_init(&l->lock, NULL) != 0) {
        (void)pthread_cond_destroy(&l->changed);
        made = false;
    }
    if (!made) {
        cer_free(l);
        return cer_fail(err, CER_NOMEM, "out of memory for lanes");
    }
    *out = l;
    return CER_OK;
}

void
cer_lanes_free(cer_lanes *l)
{
    if (l == NULL)
        return;
    (void)pthread_cond_destroy(&l->changed);
    (void)pthread_mutex_destroy(&l->lock);
    cer_free(l);
}

/* --- the queue: under the lock ---------------------------------------------
 */

static void
put_last(cer_lanes *l, cer_lane *lane)
{
    lane->place = CER_LANE_QUEUE;
    lane->next = NULL;
    *l->last = lane;
    l->last = &lane->next;
}

static void
hold(cer_lanes *l, cer_lane *lane)
{
    cer_lane **link = &l->first;

    while (*link != lane)
        link = &(*link)->next;
    *link = lane->next;
    if (lane->next == NULL)
        l->last = link;
    lane->place = CER_LANE_HELD;
}

/* Puts a lane back after its turn, or lets it go. */
static void
put_back(cer_lanes *l, cer_lane *lane, cer_lane_state state)
{
    if (state == CER_LANE_GOING || state == CER_LANE_WAITING) {
        put_last(l, lane);
        if (lane->is_wanted)
            (void)pthread_cond_broadcast(&l->changed);
        return;
    }
    lane->place = CER_LANE_OUT;
    l->n--;
    (void)pthread_cond_broadcast(&l->changed);
}

/* --- leading ----------------------------------------------------------------
 */

/* The device on which the leader is. */
typedef struct visited {
    cer_device *device; /* NULL: none */
    cer_device_visit visit;
} visited;

static void
leave(visited *at)
{
    if (at->device != NULL)
        cer_device_leave(at->device, &at->visit);
    at->device = NULL;
}

static cer_lane_state
drive(cer_lane *lane, bool may_wait, visited *at)
{
    if (at->device != lane->device) {
        leave(at);
        if (cer_device_enter(lane->device, &at->visit, &lane->error) !=
            CER_OK) {
            cer_lane_fail(lane);
            return CER_LANE_FAILED;
        }
        at->device = lane->device;
    }
    return cer_lane_step(lane, may_wait);
}

/* Gives a lane its turn, outside the lock. */
static cer_lane_state
give_turn(cer_lanes *l, cer_lane *lane, bool may_wait, visited *at)
{
    cer_lane_state state;

    hold(l, lane);
    (void)pthread_mutex_unlock(&l->lock);
    state = drive(lane, may_wait, at);
    (void)pthread_mutex_lock(&l->lock);
    l->steps++;
    if (state != CER_LANE_WAITING)
        lane->waiting_since = 0;
    else if (lane->waiting_since == 0)
        lane->waiting_since = l->steps;
    put_back(l, lane, state);
    return state;
}

/* All lanes wait. One that waits for its loader's threads waits in its turn;
 * else the leader sleeps until the lane that has waited longest may go on. */
static void
rest(cer_lanes *l, visited *at)
{
    cer_lane *oldest = NULL;

    for (cer_lane *lane = l->first; lane != NULL; lane = lane->next) {
        if (oldest == NULL || (lane->awaits_loader && !oldest->awaits_loader) ||
            (lane->awaits_loader == oldest->awaits_loader &&
             lane->waiting_since < oldest->waiting_since))
            oldest = lane;
    }
    if (oldest == NULL)
        return;
    if (oldest->awaits_loader) {
        (void)give_turn(l, oldest, true, at);
        return;
    }
    hold(l, oldest);
    (void)pthread_mutex_unlock(&l->lock);
    cer_lane_sleep(oldest);
    (void)pthread_mutex_lock(&l->lock);
    put_back(l, oldest, CER_LANE_WAITING);
}

static bool
is_past(const struct timespec *time)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec > time->tv_sec ||
           (now.tv_sec == time->tv_sec && now.tv_nsec >= time->tv_nsec);
}

/* Drives all lanes until this one is out or it is `until`. */
static void
lead(cer_lanes *l, const cer_lane *lane, const struct timespec *until)
{
    visited at = {.device = NULL};
    size_t skipped = 0;

    l->led = true;
    while (lane->place != CER_LANE_OUT && !is_past(until)) {
        if (give_turn(l, l->first, false, &at) != CER_LANE_WAITING)
            skipped = 0;
        else if (++skipped >= l->n) {
            rest(l, &at);
            skipped = 0;
        }
    }
    leave(&at);
    l->led = false;
    (void)pthread_cond_broadcast(&l->changed);
}

cer_lane_state
cer_lanes_drive(cer_lanes *l, cer_lane *lane, unsigned ms)
{
    struct timespec until;
    cer_lane_state state;

    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    until.tv_sec += ms / 1000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    (void)pthread_mutex_lock(&l->lock);
    if (lane->place == CER_LANE_OUT &&
        (lane->state == CER_LANE_GOING || lane->state == CER_LANE_WAITING)) {
        lane->waiting_since = 0;
        l->n++;
        put_last(l, lane);
    }
    while (lane->place != CER_LANE_OUT && !is_past(&until)) {
        if (l->led)
            (void)pthread_cond_timedwait(&l->changed, &l->lock, &until);
        else
            lead(l, lane, &until);
    }
    state = lane->place == CER_LANE_OUT ? lane->state : CER_LANE_GOING;
    (void)pthread_mutex_unlock(&l->lock);
    return state;
}

void
cer_lanes_leave(cer_lanes *l, cer_lane *lane)
{
    (void)pthread_mutex_lock(&l->lock);
    lane->is_wanted = true;
    while (lane->place == CER_LANE_HELD)
        (void)pthread_cond_wait(&l->changed, &l->lock);
    lane->is_wanted = false;
    if (lane->place == CER_LANE_QUEUE) {
        hold(l, lane);
        lane->place = CER_LANE_OUT;
        l->n--;
    }
    (void)pthread_mutex_unlock(&l->lock);
}
