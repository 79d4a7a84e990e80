/* Ends whatever runs in the container but the commands to keep, and what these started. */
#include "supervisor.h"
#include <dirent.h>

#define ROUNDS 5000 /* of a millisecond: one that does not die by then hangs in the kernel */

struct process {
    pid_t pid, parent, session;
    int kept;
};

static struct process *processes;
static size_t found, room;

/* One that lives: not a zombie, not this. */
static int look(const char *name, struct process *process) {
    char path[64], text[1024], *end, state;
    ssize_t size;
    int fd;
    process->pid = atoi(name), process->kept = 0;
    if (process->pid <= 1 || snprintf(path, sizeof path, "/proc/%d/stat", process->pid) < 0) return 0;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return 0;
    text[size] = 0;
    end = strrchr(text, ')'); /* the name before it is the program's own choice */
    if (!end || sscanf(end + 1, " %c %d %*d %d", &state, &process->parent, &process->session) != 3) return 0;
    return state != 'Z' && state != 'X';
}

static int list_processes(void) {
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    found = 0;
    while (proc && (entry = readdir(proc))) {
        if (found == room) processes = realloc(processes, (room = 2 * room + 64) * sizeof *processes);
        if (!processes) _exit(2);
        found += look(entry->d_name, &processes[found]);
    }
    if (proc) closedir(proc);
    return proc ? 0 : -1;
}

static int is_kept(const struct process *process, const char *keep, size_t size) {
    for (size_t at = 0; at + 4 <= size; at += 4) {
        uint32_t id;
        memcpy(&id, keep + at, 4);
        for (size_t i = 0; i < count; i++)
            if (commands[i].id == id && !commands[i].exited && commands[i].pid == process->session) return 1;
    }
    for (size_t i = 0; i < found; i++)
        if (processes[i].pid == process->parent && processes[i].kept) return 1;
    return 0;
}

static void mark_kept(const char *keep, size_t size) {
    for (int more = 1; more;) {
        more = 0;
        for (size_t i = 0; i < found; i++)
            if (!processes[i].kept && is_kept(&processes[i], keep, size)) processes[i].kept = more = 1;
    }
}

/* Everything is stopped while it is looked at: a signal to all is atomic, and one that was just sent it cannot fork. */
static uint32_t round_of(const char *keep, size_t size) {
    uint32_t left = 0;
    kill(-1, size ? SIGSTOP : SIGKILL);
    reap();
    if (list_processes()) return UINT32_MAX;
    mark_kept(keep, size);
    for (size_t i = 0; i < found; i++)
        if (!processes[i].kept) left++, kill(processes[i].pid, SIGKILL);
    return left;
}

void quiesce(uint32_t id, const char *keep, size_t size) {
    uint32_t left = UINT32_MAX;
    for (int rounds = 0; left && rounds < ROUNDS; rounds++)
        if ((left = round_of(keep, size))) usleep(1000);
    if (size) kill(-1, SIGCONT);
    reap();
    send_message(QUIET, id, &left, sizeof left);
}
