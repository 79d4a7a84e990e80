/* In the child: what happens between the fork and the command, and the built-in commands. */
#include "supervisor.h"

#define GROUPS_MAX 256
#define ACCOUNTS_MAX (1 << 20)

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

static int cut_one(const char *path, const struct stat *found, int kind, struct FTW *at) {
    (void)found, (void)kind, (void)at;
    if (!remove(path) || errno == ENOENT || errno == EBUSY || errno == ENOTEMPTY) return 0; /* a mount stays */
    return errno;
}

/* Removes whatever is at the paths of its input, each ended by a null byte; links are not followed. */
static void cut(void) {
    struct stat found;
    char *paths;
    if (fstat(0, &found)) _exit(errno);
    if (!found.st_size) _exit(0);
    paths = mmap(NULL, found.st_size, PROT_READ, MAP_PRIVATE, 0, 0);
    if (paths == MAP_FAILED) _exit(errno);
    for (char *path = paths; path < paths + found.st_size; path += strlen(path) + 1) {
        int failed = nftw(path, cut_one, 64, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
        if (failed > 0) _exit(failed);
        if (failed < 0 && errno != ENOENT && errno != ENOTDIR) _exit(errno);
    }
    _exit(0);
}

void child(struct order *order, int in, int out, int err, int report) {
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
    if (!strcmp(order->argv[0], "\001cut")) cut();
    execvp(order->argv[0], order->argv);
    give_up(report, STAGE_EXEC);
}
