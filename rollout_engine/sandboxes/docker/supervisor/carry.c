/* The other forwarder, where no socket of the engine's can be mounted: its own stdin and stdout carry the connections.
 *
 * A command of its own, `supervisor carry PORT`. It says the port as `forward` does; from then on messages go both ways,
 * of main.c's form, whose id names a connection, and is never used twice. Each side sends at most WINDOW_EACH bytes of a
 * connection beyond what the other has granted, and has room for them: none that stands still holds up another. Its
 * output is read at all times, so it writes as it would to a file. What it does not know any more it passes over.
 */
#include "supervisor.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

enum { OPENS = 1, DATA = 2, GRANTS = 3, ENDS = 4, BREAKS = 5 };

#define WINDOW_EACH CHUNK   /* of one connection, in one direction */
#define GRANT_AT (WINDOW_EACH / 4)
#define PIECE (CHUNK / 2)   /* at most so much of one connection before the next has its turn */

struct carried {
    uint32_t id;
    int fd;
    uint32_t credit; /* so much of the program's may be sent */
    uint32_t owed;   /* so much of the engine's was handed on, and not granted again yet */
    size_t at, held; /* of `data`: what the program did not take yet */
    int ended;       /* the program's direction: it was told to the engine */
    int last;        /* the engine's: nothing comes after what is held */
    int shut;        /* the program knows that */
    char data[WINDOW_EACH];
};

static struct carried *carried[LINKS_MAX];
static size_t carrying;

static void take_on(int listener) {
    static uint32_t ids;
    int one = 1, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    struct carried *link = fd < 0 ? NULL : malloc(sizeof *link);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) usleep(10000);
        return;
    }
    if (!link) {
        close(fd);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    link->id = ++ids, link->fd = fd, link->credit = WINDOW_EACH, link->owed = 0;
    link->at = link->held = 0, link->ended = link->last = link->shut = 0;
    carried[carrying++] = link;
    send_message(OPENS, link->id, "", 0);
}

static void part(size_t i) {
    close(carried[i]->fd);
    free(carried[i]);
    carried[i] = carried[--carrying];
}

/* ---- to the program ---- */

/* Hands on what is held. Returns -1 where the connection is broken. */
static int hand_on(struct carried *link) {
    ssize_t size = link->held ? write(link->fd, link->data + link->at, link->held) : 0;
    if (size < 0) return may_wait(size) ? 0 : -1;
    link->at += size, link->held -= size, link->owed += size;
    if (link->owed >= GRANT_AT && !link->last) {
        send_message(GRANTS, link->id, &link->owed, sizeof link->owed);
        link->owed = 0;
    }
    if (!link->held && link->last && !link->shut) {
        link->shut = 1;
        shutdown(link->fd, SHUT_WR);
    }
    return 0;
}

static int take(struct carried *link, const char *data, size_t size) {
    if (size > WINDOW_EACH - link->held) _exit(2);
    memmove(link->data, link->data + link->at, link->held);
    memcpy(link->data + link->held, data, size);
    link->at = 0, link->held += size;
    return hand_on(link);
}

/* ---- to the engine ---- */

static int read_on(struct carried *link) {
    ssize_t size = read(link->fd, chunk + HEAD, link->credit < PIECE ? link->credit : PIECE);
    if (size < 0) return may_wait(size) ? 0 : -1;
    link->credit -= size, link->ended = size == 0;
    send_chunk(size ? DATA : ENDS, link->id, size);
    return 0;
}

/* ---- both ---- */

static void settle(size_t i, int broken) {
    if (broken) send_message(BREAKS, carried[i]->id, "", 0);
    if (broken || (carried[i]->ended && carried[i]->shut)) part(i);
}

static void obey(uint8_t kind, uint32_t id, const char *at, uint32_t size) {
    uint32_t more;
    size_t i = 0;
    while (i < carrying && carried[i]->id != id) i++;
    if (i == carrying) return;
    if (kind == DATA) settle(i, take(carried[i], at, size));
    if (kind == GRANTS && size == sizeof more) memcpy(&more, at, sizeof more), carried[i]->credit += more;
    if (kind == ENDS) carried[i]->last = 1, settle(i, hand_on(carried[i]));
    if (kind == BREAKS) part(i);
}

static void listen_to_engine(void) {
    static char held[HEAD + CHUNK];
    static size_t size;
    ssize_t got = read(0, held + size, sizeof held - size);
    uint32_t rest, id;
    char *at = held;
    if (got < 0 && errno == EINTR) return;
    if (got <= 0) _exit(0);
    size += got;
    while (size >= HEAD && (memcpy(&rest, at, 4), size - 4 >= rest)) {
        if (rest < HEAD - 4) _exit(2);
        memcpy(&id, at + 5, 4);
        obey(at[4], id, at + HEAD, rest - (HEAD - 4));
        at += 4 + rest, size -= 4 + rest;
    }
    memmove(held, at, size);
    if (size == sizeof held) _exit(2); /* a message that is larger than any may be */
}

int carry(const char *port) {
    int listener = listen_at(strtoul(port, NULL, 10));
    for (;;) {
        struct pollfd fds[2 + LINKS_MAX];
        size_t watched = carrying;
        fds[0] = (struct pollfd){0, POLLIN, 0};
        fds[1] = (struct pollfd){carrying < LINKS_MAX ? listener : -1, POLLIN, 0};
        for (size_t i = 0; i < watched; i++) { /* one of which nothing is wanted is not watched, as in forward.c */
            const struct carried *link = carried[i];
            short events = (!link->ended && link->credit ? POLLIN : 0) | (link->held ? POLLOUT : 0);
            fds[2 + i] = (struct pollfd){events ? link->fd : -1, events, 0};
        }
        if (poll(fds, 2 + watched, -1) < 0) continue;
        for (size_t i = watched; i-- > 0;) { /* from the end: one that parts is replaced by one that was served */
            struct carried *link = carried[i];
            short found = fds[2 + i].revents;
            if (found) settle(i, (link->held && hand_on(link)) || (!link->ended && link->credit && read_on(link)));
        }
        if (fds[1].revents) take_on(listener);
        if (fds[0].revents) listen_to_engine();
    }
}
