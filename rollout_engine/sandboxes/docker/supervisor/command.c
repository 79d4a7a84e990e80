/* The commands under way: their start, their input and output, their end. */
#include "supervisor.h"

struct command *commands;
size_t count;
static size_t capacity;

static int input_of(struct order *order) {
    int fd;
    size_t done = 0;
    if (order->input_kind == NO_INPUT) return open("/dev/null", O_RDONLY | O_CLOEXEC);
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

void start(uint32_t id, struct order *order) {
    enum { IN_R, IN_W, OUT_R, OUT_W, ERR_R, ERR_W, REPORT_R, REPORT_W, ALL };
    int fd[ALL] = {-1, -1, -1, -1, -1, -1, -1, -1}, talks = order->input_kind == TALKS;
    long kills = oom_kills();
    pid_t pid = -1;
    char *pending = talks ? malloc(WINDOW) : NULL;
    if (count == capacity) commands = realloc(commands, (capacity = 2 * capacity + 8) * sizeof *commands);
    if (!commands || (talks && !pending)) _exit(2);
    if (!talks) fd[IN_R] = input_of(order);
    if ((talks ? !pipe2(fd + IN_R, O_CLOEXEC) : fd[IN_R] >= 0) && !pipe2(fd + OUT_R, O_CLOEXEC) && !pipe2(fd + ERR_R, O_CLOEXEC) &&
        !pipe2(fd + REPORT_R, O_CLOEXEC))
        pid = fork();
    if (pid < 0) {
        struct failure failure = {STAGE_START, errno};
        close_all(fd, ALL);
        free(pending);
        send_message(FAIL, id, &failure, sizeof failure);
        return;
    }
    if (pid == 0) child(order, fd[IN_R], fd[OUT_W], fd[ERR_W], fd[REPORT_W]);
    int ends[] = {fd[IN_R], fd[OUT_W], fd[ERR_W], fd[REPORT_W]};
    close_all(ends, 4);
    int ours[] = {fd[OUT_R], fd[ERR_R], fd[REPORT_R], fd[IN_W]};
    for (int i = 0; i < 4; i++) fcntl(ours[i], F_SETFL, O_NONBLOCK);
    commands[count++] = (struct command){
        id, pid, {fd[OUT_R], fd[ERR_R]}, fd[REPORT_R], 0, kills, fd[IN_W], pending, 0, WINDOW,
    };
}

/* ---- those that are talked to ---- */

static void shut(struct command *command) {
    if (command->in < 0) return;
    close(command->in);
    command->in = -1;
    send_message(SHUT, command->id, "", 0);
}

/* Nobody reads its output any more, nor writes to it. */
static void hang_up(struct command *command) {
    shut(command);
    if (command->fd[0] >= 0) close(command->fd[0]);
    command->fd[0] = -1;
}

/* Hands on as much of its input as it takes now. */
static void push(struct command *command) {
    ssize_t size = 1;
    uint32_t taken = 0;
    while (command->held > taken && (size = write(command->in, command->pending + taken, command->held - taken)) > 0)
        taken += size;
    if (size < 0 && errno != EAGAIN && errno != EINTR) {
        shut(command);
        return;
    }
    command->held -= taken;
    memmove(command->pending, command->pending + taken, command->held);
    if (taken) send_message(TAKEN, command->id, &taken, sizeof taken);
}

void feed(uint32_t id, const char *data, size_t size) {
    for (size_t i = 0; i < count; i++) {
        struct command *command = &commands[i];
        if (command->id != id || command->in < 0) continue;
        if (size > WINDOW - command->held) _exit(2);
        memcpy(command->pending + command->held, data, size);
        command->held += size;
        push(command);
    }
}

void grant(uint32_t id, const char *at) {
    uint32_t more;
    memcpy(&more, at, 4);
    for (size_t i = 0; i < count; i++)
        if (commands[i].id == id) commands[i].credit += more;
}

/* ---- all ---- */

void watch(struct pollfd *fds, size_t watched) {
    for (size_t i = 0; i < watched; i++) {
        struct command *command = &commands[i];
        int held_back = command->pending && !command->credit;
        fds[3 * i] = (struct pollfd){held_back ? -1 : command->fd[0], POLLIN, 0};
        fds[3 * i + 1] = (struct pollfd){command->fd[1], POLLIN, 0};
        fds[3 * i + 2] = (struct pollfd){command->in, command->held ? POLLOUT : 0, 0};
    }
}

/* Reads once. Returns 0 when there is nothing more for now. */
static int pump(struct command *command, int stream) {
    ssize_t size;
    int talk = stream == 0 && command->pending;
    size_t room = talk && command->credit < CHUNK ? command->credit : CHUNK;
    if (command->fd[stream] < 0 || !room) return 0;
    size = read(command->fd[stream], chunk + HEAD, room);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (size <= 0) {
        close(command->fd[stream]);
        command->fd[stream] = -1;
        if (talk) send_message(OUT, command->id, "", 0);
        return 0;
    }
    if (talk) command->credit -= size;
    if (talk || !command->exited) send_chunk(stream == 0 ? OUT : ERR, command->id, size);
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
    ending.oom = oom_kills() > command->oom_kills;
    ending.group = command->pid;
    command->exited = 1;
    if (read(command->report, &failure, sizeof failure) == sizeof failure)
        send_message(FAIL, command->id, &failure, sizeof failure);
    else
        send_message(EXIT, command->id, &ending, sizeof ending);
    close(command->report);
}

void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (size_t i = 0; i < count; i++)
            if (commands[i].pid == pid && !commands[i].exited) ended(&commands[i], status);
}

void forget_finished(void) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (!commands[i].exited || commands[i].fd[0] >= 0 || commands[i].fd[1] >= 0) {
            commands[kept++] = commands[i];
        } else {
            shut(&commands[i]);
            free(commands[i].pending);
        }
    count = kept;
}

/* The group of a command that runs, or what an ended one left in `group`, unless a later command has that number. */
void kill_group(uint32_t id, const char *at) {
    int32_t group;
    memcpy(&group, at, 4);
    for (size_t i = 0; i < count; i++) {
        if (commands[i].id == id && commands[i].pending) hang_up(&commands[i]);
        if (commands[i].exited) continue;
        if (commands[i].id == id && kill(-commands[i].pid, SIGKILL)) { /* it was forked, but has no group yet */
            kill(commands[i].pid, SIGKILL);
            kill(-commands[i].pid, SIGKILL);
        }
        if (commands[i].pid == group) group = 0;
    }
    if (group > 1) kill(-group, SIGKILL);
}

void serve(const struct pollfd *fds, size_t watched) {
    for (size_t i = 0; i < watched; i++) {
        if (fds[3 * i].revents) pump(&commands[i], 0);
        if (fds[3 * i + 1].revents) pump(&commands[i], 1);
        if (fds[3 * i + 2].revents & POLLERR) shut(&commands[i]);
        else if (fds[3 * i + 2].revents && commands[i].in >= 0) push(&commands[i]);
    }
}
