/* The first process of a docker sandbox: starts commands, passes their output on, reaps, and ends with its owner.
 *
 * It speaks with the engine over its own stdin and stdout (the daemon's attach stream). A message, both ways:
 *   u32 size of what follows the size, u8 kind, u32 id of the command, payload      (numbers in the machine's order)
 *
 * What it relies on: the container's confinement is docker's; it is pid 1, so nothing inside can kill it; it is not
 * dumpable, so nothing inside can trace it or open its descriptors. The end of stdin is the end of the sandbox.
 * It is single-threaded and allocates only for commands under way. Compiled statically: it needs no file of the image.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RUN = 1, KILL = 2 };                                /* from the engine */
enum { HELLO = 0, OUT = 1, ERR = 2, EXIT = 3, FAIL = 4 };  /* to the engine */
enum { STAGE_USER = 1, STAGE_CWD = 2, STAGE_EXEC = 3, STAGE_START = 4 };

#define HEAD 9                /* size, kind, id */
#define CHUNK 65536
#define DRAIN_MAX (1 << 20)   /* a background child may write for ever: this much is read after the command's exit */
#define GROUPS_MAX 256
#define ACCOUNTS_MAX (1 << 20)

struct command {
    uint32_t id;
    pid_t pid;
    int fd[2];      /* its stdout and stderr; -1 at their end */
    int report;     /* tells why it could not be started; at its end the command runs */
    int exited;     /* what still comes is a background child's: read, so that it is not killed, and dropped */
    long oom_kills; /* of the container when it started */
};

struct failure {
    uint8_t stage;
    int32_t error;
} __attribute__((packed));

struct order { /* a RUN, in place in the message */
    char *user, *cwd, **argv, **env;
    int has_stdin;
    const char *input;
    size_t input_size;
};

static struct command *commands;
static size_t count, capacity;
static int oom_fd = -1;
static char chunk[HEAD + CHUNK];

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
static void send_chunk(uint8_t kind, uint32_t id, uint32_t size) {
    uint32_t rest = size + HEAD - 4;
    memcpy(chunk, &rest, 4);
    chunk[4] = kind;
    memcpy(chunk + 5, &id, 4);
    write_all(1, chunk, HEAD + size);
}

static void send_message(uint8_t kind, uint32_t id, const void *data, uint32_t size) {
    memcpy(chunk + HEAD, data, size);
    send_chunk(kind, id, size);
}

/* How many processes of this container the kernel killed for memory; -1 where it does not tell. */
static long oom_kills(void) {
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

/* ---- in the child ---- */

static void give_up(int report, uint8_t stage) {
    struct failure failure = {stage, errno};
    (void)!write(report, &failure, sizeof failure);
    _exit(127);
}

/* A small regular file of the image, or NULL: a pipe or a monster in its place would hold us up. */
static FILE *account_file(const char *path) {
    struct stat found;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd >= 0 && !fstat(fd, &found) && S_ISREG(found.st_mode) && found.st_size <= ACCOUNTS_MAX) return fdopen(fd, "r");
    if (fd >= 0) close(fd);
    return NULL;
}

static int split_user(char *user, uid_t *uid, gid_t *gid, char **name, char **home) {
    char *group = strchr(user, ':'), *end;
    struct passwd *entry;
    FILE *file;
    if (group) *group++ = 0;
    *uid = strtoul(user, &end, 10);
    int numeric = *user && !*end, found = 0;
    *gid = 0, *name = NULL, *home = "/";
    file = account_file("/etc/passwd");
    while (file && !found && (entry = fgetpwent(file)))
        if (numeric ? entry->pw_uid == *uid : !strcmp(entry->pw_name, user)) {
            *uid = entry->pw_uid, *gid = entry->pw_gid, *name = strdup(entry->pw_name), *home = strdup(entry->pw_dir);
            found = 1;
        }
    if (file) fclose(file);
    if (!found && !numeric && !strcmp(user, "root")) numeric = 1, *uid = 0;
    if (group && *group) {
        *gid = strtoul(group, &end, 10);
        if (*end) return -1; /* groups by number only */
        *name = NULL;
    }
    return found || numeric ? 0 : -1;
}

static size_t groups_of(const char *name, gid_t gid, gid_t *groups) {
    size_t found = 0;
    struct group *entry;
    FILE *file = name ? account_file("/etc/group") : NULL;
    groups[found++] = gid;
    while (file && found < GROUPS_MAX && (entry = fgetgrent(file)))
        for (char **member = entry->gr_mem; *member; member++)
            if (!strcmp(*member, name) && found < GROUPS_MAX) groups[found++] = entry->gr_gid;
    if (file) fclose(file);
    return found;
}

static void become(char *user, int report) {
    uid_t uid;
    gid_t gid, groups[GROUPS_MAX];
    char *name, *home;
    errno = EINVAL;
    if (split_user(user, &uid, &gid, &name, &home)) give_up(report, STAGE_USER);
    if (setgroups(groups_of(name, gid, groups), groups) || setresgid(gid, gid, gid) || setresuid(uid, uid, uid))
        give_up(report, STAGE_USER);
    setenv("HOME", home, 1);
}

/* The built-in commands end with an errno, 0 for success. */
static void copy_or_exit(int from, int to, unsigned long long limit) {
    static char buffer[CHUNK];
    unsigned long long total = 0;
    ssize_t size;
    while ((size = read(from, buffer, sizeof buffer)) != 0) {
        if (size < 0 && errno == EINTR) continue;
        if (size < 0) _exit(errno);
        if ((total += size) > limit) _exit(EFBIG);
        for (ssize_t done = 0, part; done < size; done += part)
            if ((part = write(to, buffer + done, size - done)) < 0) _exit(errno);
    }
}

static int open_regular(const char *path, int flags, mode_t mode) {
    struct stat found;
    int fd = open(path, flags | O_NONBLOCK | O_CLOEXEC | O_NOCTTY, mode);
    if (fd < 0 || fstat(fd, &found)) _exit(errno == ENXIO ? EACCES : errno); /* ENXIO: a pipe that nobody reads */
    if (!S_ISREG(found.st_mode)) _exit(S_ISDIR(found.st_mode) ? EISDIR : EACCES);
    return fd;
}

static void get(const char *path, const char *limit) {
    unsigned long long most = strtoull(limit, NULL, 10);
    struct stat found;
    int fd = open_regular(path, O_RDONLY, 0);
    if (!fstat(fd, &found) && (unsigned long long)found.st_size > most) _exit(EFBIG);
    copy_or_exit(fd, 1, most);
    _exit(0);
}

static void put(char *path, const char *mode_text) {
    mode_t mode = strtoul(mode_text, NULL, 8);
    int fd;
    umask(022);
    for (char *slash = path + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        if (mkdir(path, 0755) && errno != EEXIST) _exit(errno);
    }
    fd = open_regular(path, O_WRONLY | O_CREAT, mode);
    if (ftruncate(fd, 0) || fchmod(fd, mode)) _exit(errno);
    copy_or_exit(0, fd, ~0ULL);
    _exit(close(fd) ? errno : 0);
}

static void child(struct order *order, int in, int out, int err, int report) {
    sigset_t none;
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) (void)!write(fd, "300", 3); /* the kernel's memory killer takes a command before the supervisor */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setsid();
    dup2(in, 0), dup2(out, 1), dup2(err, 2);
    become(order->user, report);
    for (char **env = order->env; *env; env++) putenv(*env);
    if (chdir(order->cwd)) give_up(report, STAGE_CWD);
    if (order->argv[0][0] == 1) close(report);
    if (!strcmp(order->argv[0], "\001get")) get(order->argv[1], order->argv[2]);
    if (!strcmp(order->argv[0], "\001put")) put(order->argv[1], order->argv[2]);
    execvp(order->argv[0], order->argv);
    give_up(report, STAGE_EXEC);
}

/* ---- in the supervisor ---- */

static int input_of(struct order *order) {
    int fd;
    size_t done = 0;
    if (!order->has_stdin) return open("/dev/null", O_RDONLY | O_CLOEXEC);
    fd = memfd_create("stdin", MFD_CLOEXEC); /* a file, not a pipe: a command that does not read holds nobody up */
    while (fd >= 0 && done < order->input_size) {
        ssize_t part = write(fd, order->input + done, order->input_size - done);
        if (part < 0) {
            close(fd);
            return -1;
        }
        done += part;
    }
    if (fd >= 0) lseek(fd, 0, SEEK_SET);
    return fd;
}

static void close_all(int *fds, int size) {
    for (int i = 0; i < size; i++)
        if (fds[i] >= 0) close(fds[i]);
}

static void start(uint32_t id, struct order *order) {
    enum { IN, OUT_R, OUT_W, ERR_R, ERR_W, REPORT_R, REPORT_W, ALL };
    int fd[ALL] = {-1, -1, -1, -1, -1, -1, -1};
    long kills = oom_kills();
    pid_t pid = -1;
    fd[IN] = input_of(order);
    if (fd[IN] >= 0 && !pipe2(fd + OUT_R, O_CLOEXEC) && !pipe2(fd + ERR_R, O_CLOEXEC) && !pipe2(fd + REPORT_R, O_CLOEXEC))
        pid = fork();
    if (pid < 0) {
        struct failure failure = {STAGE_START, errno};
        close_all(fd, ALL);
        send_message(FAIL, id, &failure, sizeof failure);
        return;
    }
    if (pid == 0) child(order, fd[IN], fd[OUT_W], fd[ERR_W], fd[REPORT_W]);
    int ends[] = {fd[IN], fd[OUT_W], fd[ERR_W], fd[REPORT_W]};
    close_all(ends, 4);
    fcntl(fd[OUT_R], F_SETFL, O_NONBLOCK), fcntl(fd[ERR_R], F_SETFL, O_NONBLOCK), fcntl(fd[REPORT_R], F_SETFL, O_NONBLOCK);
    commands[count++] = (struct command){id, pid, {fd[OUT_R], fd[ERR_R]}, fd[REPORT_R], 0, kills};
}

/* Reads once. Returns 0 when there is nothing more for now. */
static int pump(struct command *command, int stream) {
    ssize_t size;
    if (command->fd[stream] < 0) return 0;
    size = read(command->fd[stream], chunk + HEAD, CHUNK);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (size <= 0) {
        close(command->fd[stream]);
        command->fd[stream] = -1;
        return 0;
    }
    if (!command->exited) send_chunk(stream == 0 ? OUT : ERR, command->id, size);
    return size;
}

static void ended(struct command *command, int status) {
    struct failure failure;
    struct {
        int32_t code;
        uint8_t oom;
        int32_t group;
    } __attribute__((packed)) ending;
    for (int stream = 0; stream < 2; stream++)
        for (long left = DRAIN_MAX, size; left > 0 && (size = pump(command, stream)) > 0; left -= size) {}
    ending.code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    ending.oom = ending.code != 0 && oom_kills() > command->oom_kills;
    ending.group = command->pid;
    command->exited = 1;
    if (read(command->report, &failure, sizeof failure) == sizeof failure)
        send_message(FAIL, command->id, &failure, sizeof failure);
    else
        send_message(EXIT, command->id, &ending, sizeof ending);
    close(command->report);
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (size_t i = 0; i < count; i++)
            if (commands[i].pid == pid && !commands[i].exited) ended(&commands[i], status);
}

static void forget_finished(void) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (!commands[i].exited || commands[i].fd[0] >= 0 || commands[i].fd[1] >= 0) commands[kept++] = commands[i];
    count = kept;
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
    order.has_stdin = at[8];
    at += 9;
    order.user = string(&at, end), order.cwd = string(&at, end);
    order.argv = strings(&at, end, argc), order.env = strings(&at, end, envc);
    order.input = at, order.input_size = end - at;
    if (count == capacity) commands = realloc(commands, (capacity = 2 * capacity + 8) * sizeof *commands);
    if (!commands) _exit(2);
    start(id, &order);
    free(order.argv), free(order.env);
}

/* The group of a command that runs, or what an ended one left in `group`, unless a later command has that number. */
static void kill_group(uint32_t id, const char *at) {
    int32_t group;
    memcpy(&group, at, 4);
    for (size_t i = 0; i < count; i++) {
        if (commands[i].exited) continue;
        if (commands[i].id == id && kill(-commands[i].pid, SIGKILL)) { /* it was forked, but has no group yet */
            kill(commands[i].pid, SIGKILL);
            kill(-commands[i].pid, SIGKILL);
        }
        if (commands[i].pid == group) group = 0;
    }
    if (group > 1) kill(-group, SIGKILL);
}

static void obey(uint8_t kind, uint32_t id, char *at, char *end) {
    if (kind == RUN) run(id, at, end);
    if (kind == KILL && end - at >= 4) kill_group(id, at);
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

int main(void) {
    sigset_t mask;
    struct signalfd_siginfo drop;
    int children;
    prctl(PR_SET_DUMPABLE, 0);
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&mask), sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    children = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    open_oom_count();
    send_message(HELLO, 0, "", 0);
    for (;;) {
        struct pollfd fds[2 + 2 * count];
        size_t watched = count;
        fds[0] = (struct pollfd){0, POLLIN, 0}, fds[1] = (struct pollfd){children, POLLIN, 0};
        for (size_t i = 0; i < watched; i++)
            for (int stream = 0; stream < 2; stream++)
                fds[2 + 2 * i + stream] = (struct pollfd){commands[i].fd[stream], POLLIN, 0};
        if (poll(fds, 2 + 2 * watched, -1) < 0) continue;
        for (size_t i = 0; i < 2 * watched; i++)
            if (fds[2 + i].revents) pump(&commands[i / 2], i % 2);
        if (fds[1].revents) {
            while (read(children, &drop, sizeof drop) > 0) {}
            reap();
        }
        if (fds[0].revents) listen_to_engine();
        forget_finished();
    }
}
