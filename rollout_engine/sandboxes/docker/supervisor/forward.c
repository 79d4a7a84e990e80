/* The forwarder: leads a port of the container's own 127.0.0.1 to a socket of the engine's that is mounted there.
 *
 * A command of its own, `supervisor forward PORT SOCKET`. It says the port once it listens (port 0: a free one), or ends
 * with an errno; later it ends with its standard input. Bytes go as they come, in both directions; the end of one
 * direction is passed on, and a connection that breaks on one side is closed on the other.
 */
#include "supervisor.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>

#define WAITING_MAX 128        /* connections that are not accepted yet */
#define FLOW_BYTES (32 * 1024) /* on the way, in one direction of one connection */

struct flow {
    size_t at, held;
    int ended; /* nothing more comes, and whoever reads was told so */
    char data[FLOW_BYTES];
};

struct link {
    int fd[2];           /* the program's connection, the engine's */
    struct flow flow[2]; /* flow[i] is read from fd[i] */
};

static struct link *links[LINKS_MAX];
static size_t linked;

int listen_at(uint16_t port) {
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof where;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one)) _exit(errno);
    if (bind(fd, (struct sockaddr *)&where, size) || listen(fd, WAITING_MAX)) _exit(errno);
    if (getsockname(fd, (struct sockaddr *)&where, &size) || dprintf(1, "%d\n", ntohs(where.sin_port)) < 0) _exit(errno);
    return fd;
}

static int reach(const char *path) {
    struct sockaddr_un where = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    strncpy(where.sun_path, path, sizeof where.sun_path - 1);
    if (!connect(fd, (struct sockaddr *)&where, sizeof where) && !fcntl(fd, F_SETFL, O_NONBLOCK)) return fd;
    close(fd);
    return -1;
}

static void take_on(int listener, const char *path) {
    int one = 1, ours, theirs = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    struct link *link = theirs < 0 ? NULL : malloc(sizeof *link);
    if (theirs < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) usleep(10000);
        return;
    }
    ours = link ? reach(path) : -1;
    if (ours < 0) { /* nobody is there: the program sees its connection closed */
        free(link);
        close(theirs);
        return;
    }
    setsockopt(theirs, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    link->fd[0] = theirs, link->fd[1] = ours;
    for (int i = 0; i < 2; i++) link->flow[i].at = link->flow[i].held = link->flow[i].ended = 0;
    links[linked++] = link;
}

int may_wait(ssize_t size) {
    return size < 0 && (errno == EAGAIN || errno == EINTR);
}

/* Hands on what is held. Returns -1 where the connection is broken. */
static int hand_on(struct flow *flow, int to) {
    ssize_t size = write(to, flow->data + flow->at, flow->held);
    if (size < 0) return may_wait(size) ? 0 : -1;
    flow->at += size, flow->held -= size;
    return 0;
}

static int take_in(struct flow *flow, int from, int to) {
    ssize_t size = read(from, flow->data, sizeof flow->data);
    if (size < 0) return may_wait(size) ? 0 : -1;
    if (size == 0) {
        flow->ended = 1;
        shutdown(to, SHUT_WR);
        return 0;
    }
    flow->at = 0, flow->held = size;
    return hand_on(flow, to);
}

/* Moves what can be moved in one direction. */
static int move(struct link *link, int i, short from, short to) {
    struct flow *flow = &link->flow[i];
    if (flow->held && to && hand_on(flow, link->fd[1 - i])) return -1;
    if (!flow->held && !flow->ended && from) return take_in(flow, link->fd[i], link->fd[1 - i]);
    return 0;
}

static void part(size_t i) {
    close(links[i]->fd[0]);
    close(links[i]->fd[1]);
    free(links[i]);
    links[i] = links[--linked];
}

/* A descriptor of which nothing is wanted is not watched: its hang-up would be told again and again. */
static struct pollfd wanted(const struct link *link, int i) {
    const struct flow *in = &link->flow[i], *out = &link->flow[1 - i];
    short events = (!in->held && !in->ended ? POLLIN : 0) | (out->held ? POLLOUT : 0);
    return (struct pollfd){events ? link->fd[i] : -1, events, 0};
}

int forward(const char *port, const char *path) {
    int listener = listen_at(strtoul(port, NULL, 10));
    for (;;) {
        struct pollfd fds[2 + 2 * LINKS_MAX];
        size_t watched = linked;
        fds[0] = (struct pollfd){0, POLLIN, 0};
        fds[1] = (struct pollfd){linked < LINKS_MAX ? listener : -1, POLLIN, 0};
        for (size_t i = 0; i < 2 * watched; i++) fds[2 + i] = wanted(links[i / 2], i % 2);
        if (poll(fds, 2 + 2 * watched, -1) < 0) continue;
        if (fds[0].revents) return 0;
        for (size_t i = watched; i-- > 0;) { /* from the end: one that parts is replaced by one that was served */
            struct link *link = links[i];
            short program = fds[2 + 2 * i].revents, engine = fds[3 + 2 * i].revents;
            if (move(link, 0, program, engine) || move(link, 1, engine, program) || (link->flow[0].ended && link->flow[1].ended))
                part(i);
        }
        if (fds[1].revents) take_on(listener, path);
    }
}
