/* What the parts of the supervisor share; main.c says what it is. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
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

enum { RUN = 1, KILL = 2, FEED = 3, GRANT = 4, QUIESCE = 5 }; /* from the engine */
enum { HELLO = 0, OUT = 1, ERR = 2, EXIT = 3, FAIL = 4, TAKEN = 5, SHUT = 6, QUIET = 7 }; /* to the engine */
enum { STAGE_USER = 1, STAGE_CWD = 2, STAGE_EXEC = 3, STAGE_START = 4 };
enum { NO_INPUT = 0, ALL_INPUT = 1, TALKS = 2 };

#define HEAD 9                /* size, kind, id */
#define CHUNK 65536
#define WINDOW (256 * 1024)   /* a program that is talked to has at most this much on its way, in either direction */
#define DRAIN_MAX (1 << 20)   /* a background child may write for ever: this much is read after the command's exit */

struct command {
    uint32_t id;
    pid_t pid;
    int fd[2];      /* its stdout and stderr; -1 at their end */
    int report;     /* tells why it could not be started; at its end the command runs */
    int exited;     /* what still comes is a background child's: read, so that it is not killed, and dropped */
    long oom_kills; /* of the container when it started */
    int in;         /* of one that is talked to: its stdin, -1 at its end */
    char *pending;  /* what it did not take yet; NULL for one that is not talked to */
    size_t held;
    uint32_t credit; /* so much of its stdout may be sent */
};

struct failure {
    uint8_t stage;
    int32_t error;
} __attribute__((packed));

struct order { /* a RUN, in place in the message */
    char *user, *cwd, **argv, **env;
    int input_kind;
    const char *input;
    size_t input_size;
};

/* main.c */
extern char chunk[HEAD + CHUNK];
void send_chunk(uint8_t kind, uint32_t id, uint32_t size);
void send_message(uint8_t kind, uint32_t id, const void *data, uint32_t size);
long oom_kills(void);

/* child.c: in the child, until it is the command */
void child(struct order *order, int in, int out, int err, int report);

/* command.c */
extern struct command *commands;
extern size_t count;
void start(uint32_t id, struct order *order);
void kill_group(uint32_t id, const char *at);
void feed(uint32_t id, const char *data, size_t size);
void grant(uint32_t id, const char *at);
void reap(void);
void forget_finished(void);
void watch(struct pollfd *fds, size_t commands_watched);
void serve(const struct pollfd *fds, size_t commands_watched);

/* quiesce.c */
void quiesce(uint32_t id, const char *keep, size_t size);

/* forward.c: another program in the same file */
#define LINKS_MAX 256 /* connections at once: one or two descriptors each; the next ones wait */
int forward(const char *port, const char *path);
int listen_at(uint16_t port);
int may_wait(ssize_t size);

/* carry.c: the same for an engine that is elsewhere */
int carry(const char *port);
