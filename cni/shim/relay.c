/* nodefabric-cni: the CNI executable on the host.
 *
 * Hands the runtime's request, with an open descriptor of the pod's network namespace, to the node's agent and
 * prints the agent's answer. It decides three things only: VERSION needs no agent; an ADD, CHECK, GC or STATUS
 * waits a bounded time for an agent that restarts; a DEL that no agent takes goes to disk and has succeeded.
 *
 * Environment, beside CNI's own:
 *   NODEFABRIC_CNI_SOCKET  the agent's socket
 *   NODEFABRIC_CNI_SPOOL   the folder that keeps DELs
 *   NODEFABRIC_CNI_WAIT    seconds: both waits of ADD, CHECK and GC, and the most that DEL and STATUS wait
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deadline.h"
#include "frame.h"
#include "link.h"
#include "report.h"
#include "spool.h"

enum { FIRST_PAUSE_MS = 5, LONGEST_PAUSE_MS = 50, WAIT_LIMIT_S = 3600 };

static const char versions[] =
    "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n";

enum namespace_need { NO_NAMESPACE, NAMESPACE_IF_THERE, NAMESPACE_NEEDED };

struct command {
    const char *name;
    enum namespace_need need;
    bool spooled;      /* without an agent: kept on disk, and a success */
    bool patient;      /* NODEFABRIC_CNI_WAIT may lengthen its waits */
    int code;          /* when no answer comes */
    int64_t absent_ms; /* wait for an agent that is not there */
    int64_t answer_ms; /* wait for the answer of one that is */
};

static const struct command commands[] = {
    {"ADD", NAMESPACE_NEEDED, false, true, TRY_AGAIN_LATER, 10000, 90000},
    {"DEL", NAMESPACE_IF_THERE, true, false, TRY_AGAIN_LATER, 100, 20000},
    {"CHECK", NAMESPACE_NEEDED, false, true, TRY_AGAIN_LATER, 10000, 90000},
    {"GC", NO_NAMESPACE, false, true, TRY_AGAIN_LATER, 10000, 90000},
    {"STATUS", NO_NAMESPACE, false, false, PLUGIN_NOT_AVAILABLE, 1000, 1000},
};

static const char *variable(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value == NULL || *value == 0 ? otherwise : value;
}

static int invalid(const char *msg, const char *thing, const char *why)
{
    return report(&(struct trouble){.code = INVALID_ENVIRONMENT, .msg = msg, .thing = thing, .why = why});
}

/* Reads "12" or "0.25" seconds into milliseconds. */
static bool parse_seconds(const char *text, int64_t *milliseconds)
{
    int64_t whole = 0, part = 0, weight = 100;
    const char *at = text;
    for (; *at >= '0' && *at <= '9' && whole <= WAIT_LIMIT_S; at++)
        whole = whole * 10 + (*at - '0');
    if (at == text)
        return false;
    if (*at == '.')
        for (at++; *at >= '0' && *at <= '9'; at++, weight /= 10)
            part += (*at - '0') * weight;
    *milliseconds = whole * 1000 + part;
    return *at == 0 && *milliseconds <= WAIT_LIMIT_S * 1000;
}

static void apply_wait(struct command *command, int64_t wait)
{
    if (command->patient || wait < command->absent_ms)
        command->absent_ms = wait;
    if (command->patient || wait < command->answer_ms)
        command->answer_ms = wait;
}

/* Asks until there is an answer, or the command's patience ends. Time in which the agent works is not time in which
 * it is away, but an agent that takes requests and dies, over and over, must not hold a pod for ever either. */
static struct exchange converse(const struct command *command, const struct sockaddr_un *agent,
                                const struct frame *request, int netns)
{
    int64_t end = now_ms() + command->absent_ms + command->answer_ms;
    int64_t away = 0, pause = FIRST_PAUSE_MS;
    for (;;) {
        int64_t deadline = now_ms() + command->answer_ms;
        struct exchange exchange = ask_agent(agent, request, netns, deadline < end ? deadline : end);
        if (exchange.outcome == ANSWERED || exchange.outcome == NO_ANSWER)
            return exchange;
        if (away >= command->absent_ms || now_ms() >= end)
            return exchange;
        if (exchange.outcome == AGENT_AWAY && pause > command->absent_ms - away)
            pause = command->absent_ms - away;
        sleep_ms(pause);
        if (exchange.outcome == AGENT_AWAY)
            away += pause;
        pause = pause * 2 < LONGEST_PAUSE_MS ? pause * 2 : LONGEST_PAUSE_MS;
    }
}

/* Opens the pod's namespace: -1 if it is not wanted or not there, -2 (reported) if it must be there.
 * The descriptor, unlike the path, cannot come to mean another namespace while the request waits. */
static int open_namespace(const struct command *command)
{
    const char *path = variable("CNI_NETNS", "");
    if (command->need == NO_NAMESPACE || *path == 0)
        return -1;
    int netns = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* non-blocking: the path may be a pipe */
    if (netns >= 0 || command->need == NAMESPACE_IF_THERE)
        return netns;
    invalid("the network namespace in CNI_NETNS cannot be opened", path, strerror(errno));
    return -2;
}

static int relay(const struct command *command, const struct sockaddr_un *agent)
{
    struct frame request;
    struct trouble trouble;
    if (!compose_request(&request, &trouble))
        return report(&trouble);
    int netns = open_namespace(command);
    if (netns == -2)
        return EXIT_FAILURE;
    struct exchange exchange = converse(command, agent, &request, netns);
    if (exchange.outcome == ANSWERED) {
        if (!print_all(answer_body(&exchange.answer), answer_body_length(&exchange.answer)))
            return EXIT_FAILURE;
        return answer_exit(&exchange.answer);
    }
    if (!command->spooled)
        return report(&(struct trouble){
            .code = command->code,
            .msg = "the nodefabric agent gives no answer; is its pod on this node running?",
            .thing = agent->sun_path,
            .why = exchange.why,
        });
    if (!spool_request(variable("NODEFABRIC_CNI_SPOOL", "/var/lib/nodefabric/spool"), &request, &trouble))
        return report(&trouble);
    return EXIT_SUCCESS;
}

/* A runtime may start us without standard streams. Then the socket must not become standard output. */
static bool occupy_standard_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            return false;
    return true;
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    umask(0);
    if (!occupy_standard_streams())
        return invalid("the standard streams cannot be opened", "/dev/null", strerror(errno));
    const char *name = variable("CNI_COMMAND", "");
    if (*name == 0)
        return invalid("CNI_COMMAND is not set", "this program", "is run by a container runtime, as CNI specifies");
    if (strcmp(name, "VERSION") == 0)
        return print_all(versions, sizeof versions - 1) ? EXIT_SUCCESS : EXIT_FAILURE;

    struct sockaddr_un agent = {.sun_family = AF_UNIX};
    const char *socket_path = variable("NODEFABRIC_CNI_SOCKET", "/run/nodefabric/cni.sock");
    if (strlen(socket_path) >= sizeof agent.sun_path)
        return invalid("NODEFABRIC_CNI_SOCKET is too long", socket_path, "a socket's path has at most 107 bytes");
    strcpy(agent.sun_path, socket_path);

    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(name, commands[i].name) != 0)
            continue;
        struct command command = commands[i];
        const char *wait = variable("NODEFABRIC_CNI_WAIT", NULL);
        int64_t milliseconds = 0;
        if (wait != NULL && !parse_seconds(wait, &milliseconds))
            return invalid("NODEFABRIC_CNI_WAIT is not a time", wait, "give seconds from 0 to 3600, as 10 or 0.5");
        if (wait != NULL)
            apply_wait(&command, milliseconds);
        return relay(&command, &agent);
    }
    return invalid("CNI_COMMAND is unknown", name, "it is none of ADD, DEL, CHECK, GC, STATUS and VERSION");
}
