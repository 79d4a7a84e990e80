/* The first process of a docker sandbox: starts commands, passes their output on, reaps, and ends with its owner.
 *
 * It speaks with the engine over its own stdin and stdout (the daemon's attach stream). A message, both ways:
 *   u32 size of what follows the size, u8 kind, u32 id of the command, payload      (numbers in the machine's order)
 *
 * What it relies on: the container's confinement is docker's; it is pid 1, so nothing inside can kill it; it is not
 * dumpable, so nothing inside can trace it or open its descriptors. The end of stdin is the end of the sandbox.
 * Started as `supervisor forward ...` or `supervisor carry ...` it is a forwarder instead: see forward.c, carry.c.
 * It is single-threaded and allocates only for commands under way. Compiled statically: it needs no file of the image.
 */
#include "supervisor.h"

static int oom_fd = -1;
char chunk[HEAD + CHUNK];

static void write_all(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t done = write(fd, data, size);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) _exit(1); /* the engine is gone, and so is the sandbox */
        data += done;
        size -= done;
    }
}

/* Sends a message whose payload lies in `chunk` behind the head. */
void send_chunk(uint8_t kind, uint32_t id, uint32_t size) {
    uint32_t rest = size + HEAD - 4;
    memcpy(chunk, &rest, 4);
    chunk[4] = kind;
    memcpy(chunk + 5, &id, 4);
    write_all(1, chunk, HEAD + size);
}

void send_message(uint8_t kind, uint32_t id, const void *data, uint32_t size) {
    memcpy(chunk + HEAD, data, size);
    send_chunk(kind, id, size);
}

/* How many processes of this container the kernel killed for memory; -1 where it does not tell. */
long oom_kills(void) {
    char text[4096], *line;
    ssize_t size = oom_fd < 0 ? -1 : pread(oom_fd, text, sizeof text - 1, 0);
    if (size < 0) return -1;
    text[size] = 0;
    line = strstr(text, "oom_kill "); /* memory.events (v2) and memory.oom_control (v1) name it alike */
    return line ? atol(line + 9) : -1;
}

static void open_oom_count(void) {
    oom_fd = open("/sys/fs/cgroup/memory.events", O_RDONLY | O_CLOEXEC);
    if (oom_fd < 0) oom_fd = open("/sys/fs/cgroup/memory/memory.oom_control", O_RDONLY | O_CLOEXEC);
}

/* Takes one NUL-terminated string; a message without it is the engine's fault and ends the sandbox. */
static char *string(char **at, char *end) {
    char *found = *at, *zero = memchr(*at, 0, end - *at);
    if (!zero) _exit(2);
    *at = zero + 1;
    return found;
}

static char **strings(char **at, char *end, uint32_t size) {
    char **list = size > (uint32_t)(end - *at) ? NULL : calloc(size + 1, sizeof *list);
    if (!list) _exit(2);
    for (uint32_t i = 0; i < size; i++) list[i] = string(at, end);
    return list;
}

static void run(uint32_t id, char *at, char *end) {
    struct order order;
    uint32_t argc, envc;
    if (end - at < 9) _exit(2);
    memcpy(&argc, at, 4), memcpy(&envc, at + 4, 4);
    order.input_kind = at[8];
    at += 9;
    order.user = string(&at, end), order.cwd = string(&at, end);
    order.argv = strings(&at, end, argc), order.env = strings(&at, end, envc);
    order.input = at, order.input_size = end - at;
    start(id, &order);
    free(order.argv), free(order.env);
}

static void obey(uint8_t kind, uint32_t id, char *at, char *end) {
    if (kind == RUN) run(id, at, end);
    if (kind == KILL && end - at >= 4) kill_group(id, at);
    if (kind == FEED) feed(id, at, end - at);
    if (kind == GRANT && end - at >= 4) grant(id, at);
    if (kind == QUIESCE) quiesce(id, at, end - at);
}

static void listen_to_engine(void) {
    static char *held;
    static size_t size, room;
    ssize_t got;
    uint32_t rest;
    if (room - size < CHUNK && !(held = realloc(held, room = 2 * room + CHUNK))) _exit(2);
    got = read(0, held + size, room - size);
    if (got < 0 && errno == EINTR) return;
    if (got <= 0) _exit(0);
    size += got;
    char *at = held;
    while (size >= HEAD && (memcpy(&rest, at, 4), size - 4 >= rest)) {
        uint32_t id;
        memcpy(&id, at + 5, 4);
        obey(at[4], id, at + HEAD, at + 4 + rest);
        at += 4 + rest, size -= 4 + rest;
    }
    memmove(held, at, size);
    if (size == 0 && room > 16 * CHUNK) free(held), held = NULL, room = 0; /* a large input is not kept */
}

int main(int argc, char **argv) {
    sigset_t mask;
    struct signalfd_siginfo drop;
    int children;
    prctl(PR_SET_DUMPABLE, 0);
    signal(SIGPIPE, SIG_IGN);
    if (argc == 4 && !strcmp(argv[1], "forward")) return forward(argv[2], argv[3]);
    if (argc == 3 && !strcmp(argv[1], "carry")) return carry(argv[2]);
    sigemptyset(&mask), sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    children = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    open_oom_count();
    send_message(HELLO, 0, "", 0);
    for (;;) {
        struct pollfd fds[2 + 3 * count];
        size_t watched = count;
        fds[0] = (struct pollfd){0, POLLIN, 0}, fds[1] = (struct pollfd){children, POLLIN, 0};
        watch(fds + 2, watched);
        if (poll(fds, 2 + 3 * watched, -1) < 0) continue;
        serve(fds + 2, watched);
        if (fds[1].revents) {
            while (read(children, &drop, sizeof drop) > 0) {}
            reap();
        }
        if (fds[0].revents) listen_to_engine();
        forget_finished();
    }
}
