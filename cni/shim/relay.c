/* nodefabric-cni: the CNI executable on the host.
 *
 * Hands the runtime's request, with an open descriptor of the pod's network namespace, to the node's agent and
 * prints the agent's answer. It decides few things itself: VERSION needs no agent, nor does a pod of which it is certain
 * that it has nothing of ours; an ADD, CHECK or GC waits a bounded time for an agent that restarts; STATUS waits for
 * none, and lets one that was ready a short while ago restart; a DEL that no agent takes goes to disk and has succeeded.
 * An agent that hangs is away, too: while it works on a request it says so each second.
 *
 * Environment, beside CNI's own:
 *   NODEFABRIC_CNI_SOCKET  the agent's socket
 *   NODEFABRIC_CNI_SPOOL   the folder that keeps DELs
 *   NODEFABRIC_CNI_WAIT    seconds: both waits of ADD, CHECK and GC, and the most that any other wait takes
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "deadline.h"
#include "frame.h"
#include "holders.h"
#include "link.h"
#include "namespace.h"
#include "netconf.h"
#include "report.h"
#include "served.h"
#include "spool.h"

enum { FIRST_PAUSE_MS = 5, LONGEST_PAUSE_MS = 50, STREAM_WAIT_MS = 30000, LEAST_STREAM_MS = 1000, MOST_DEATHS = 2 };

static const char versions[] =
    "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n";

enum namespace_need { NO_NAMESPACE, NAMESPACE_IF_THERE, NAMESPACE_NEEDED };

/* What happens when no answer comes. */
enum fallback {
    TELL,   /* an error with the command's code */
    KEEP,   /* kept on disk, and a success */
    RECALL, /* a success if the agent was ready a short while ago, else an error */
};

/* What a command comes to for a pod that has nothing of ours, in a network that asks for nothing by itself. */
enum pass {
    ASK,     /* it is not about one pod */
    SUCCESS, /* there is nothing to do */
    RESULT,  /* what the plugin before us answered */
    KNOWN,   /* about no pod: a success if all that have something are known, for then the others start */
};

struct command {
    const char *name;
    enum pass pass;
    enum namespace_need need;
    enum fallback fallback;
    bool patient;      /* NODEFABRIC_CNI_WAIT may lengthen its waits */
    int code;          /* when no answer comes */
    int64_t absent_ms; /* wait for an agent that is not there */
    int64_t answer_ms; /* wait for the answer of one that is */
    int64_t stream_ms; /* wait for the runtime to end its input, and to take our output */
};

/* ADD: kubelet gives a sandbox four minutes, and addresses may take most of them: cni/ipam/leases.py.
 * STATUS: kubelet asks every 5 s on a loop that also tells whether the runtime lives, so it is answered at once. */
static const struct command commands[] = {
    {"ADD", RESULT, NAMESPACE_NEEDED, TELL, true, TRY_AGAIN_LATER, 10000, 230000, STREAM_WAIT_MS},
    {"DEL", SUCCESS, NAMESPACE_IF_THERE, KEEP, false, TRY_AGAIN_LATER, 100, 20000, STREAM_WAIT_MS},
    {"CHECK", SUCCESS, NAMESPACE_NEEDED, TELL, true, TRY_AGAIN_LATER, 10000, 90000, STREAM_WAIT_MS},
    {"GC", ASK, NO_NAMESPACE, TELL, true, TRY_AGAIN_LATER, 10000, 90000, STREAM_WAIT_MS},
    {"STATUS", KNOWN, NO_NAMESPACE, RECALL, false, PLUGIN_NOT_AVAILABLE, 0, 1000, LEAST_STREAM_MS},
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

static void apply_wait(struct command *command, int64_t wait)
{
    if (command->patient || wait < command->absent_ms)
        command->absent_ms = wait;
    if (command->patient || wait < command->answer_ms)
        command->answer_ms = wait;
    if (wait < command->stream_ms) /* what is in a pipe already must be read in any case */
        command->stream_ms = wait > LEAST_STREAM_MS ? wait : LEAST_STREAM_MS;
}

/* Asks until there is an answer, or the command's patience ends. Time in which the agent works is not time in which
 * it is away, but an agent that takes requests and dies, over and over, must not hold a pod for ever either. Nor must
 * one request that it dies of be sent to each that follows, and keep all pods from starting. An agent that gives no
 * sign of working, or whose queue stays full, hangs: asking again would not help. */
static struct exchange converse(const struct command *command, const struct sockaddr_un *agent,
                                const struct frame *request, int netns)
{
    int64_t end = now_ms() + command->absent_ms + command->answer_ms;
    int64_t away = 0, busy = 0, pause = FIRST_PAUSE_MS;
    unsigned deaths = 0;
    for (;;) {
        int64_t deadline = now_ms() + command->answer_ms;
        struct exchange exchange = ask_agent(agent, request, netns, deadline < end ? deadline : end);
        if (exchange.outcome == ANSWERED || exchange.outcome == NO_ANSWER)
            return exchange;
        if (exchange.outcome == AGENT_DIED && ++deaths == MOST_DEATHS) {
            exchange.why = "it has taken this request twice, and ended without an answer";
            return exchange;
        }
        if (now_ms() >= end || (exchange.outcome == AGENT_AWAY && away >= command->absent_ms) || busy >= SILENCE_MS)
            return exchange;
        if (exchange.outcome == AGENT_AWAY && pause > command->absent_ms - away)
            pause = command->absent_ms - away;
        sleep_ms(pause);
        if (exchange.outcome == AGENT_AWAY)
            away += pause;
        busy = exchange.outcome == AGENT_BUSY ? busy + pause : 0;
        pause = pause * 2 < LONGEST_PAUSE_MS ? pause * 2 : LONGEST_PAUSE_MS;
    }
}

/* Lets a runtime that takes no output end us: a write to its pipe has no time limit of its own. */
static void bound_output(const struct command *command)
{
    struct itimerval limit = {.it_value.tv_sec = (time_t)(command->stream_ms / 1000 + 1)};
    setitimer(ITIMER_REAL, &limit, NULL);
}

/* Whether a call needs no agent. Then all there is to print is `result`. */
static bool passes(const struct command *command, const char *socket_path, const struct frame *request,
                   struct span *result)
{
    struct span previous;
    if (command->pass == ASK || !is_chained(request_input(request), &previous))
        return false;
    *result = (struct span){.at = previous.at, .length = command->pass == RESULT ? previous.length : 0};
    if (command->pass == KNOWN)
        return holders_are_known(socket_path);
    return (command->pass == SUCCESS || previous.length > 0) && pod_has_nothing(socket_path);
}

static int relay(const struct command *command, const struct sockaddr_un *agent)
{
    struct span result;
    struct frame request;
    struct trouble trouble;
    const char *why = NULL, *path = variable("CNI_NETNS", "");
    enum input_need input = command->fallback == KEEP ? INPUT_IF_SOUND : INPUT_NEEDED;
    if (!compose_request(&request, input, now_ms() + command->stream_ms, &trouble))
        return report(&trouble);
    int netns = command->need == NO_NAMESPACE || *path == 0 ? -1 : open_namespace(path, &why);
    if (why != NULL && command->need == NAMESPACE_NEEDED)
        return invalid("CNI_NETNS must name the pod's network namespace", path, why);
    if (passes(command, agent->sun_path, &request, &result)) {
        bound_output(command);
        return print_all(result.at, result.length) ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    struct exchange exchange = converse(command, agent, &request, netns);
    bool answered = exchange.outcome == ANSWERED;
    if (answered && command->fallback == RECALL)
        note_served(agent->sun_path, answer_exit(&exchange.answer) == 0);
    if (answered) {
        bound_output(command);
        if (!print_all(answer_body(&exchange.answer), answer_body_length(&exchange.answer)))
            return EXIT_FAILURE;
        return answer_exit(&exchange.answer);
    }
    if (command->fallback == RECALL && served_lately(agent->sun_path))
        return EXIT_SUCCESS;
    if (command->fallback == KEEP) {
        const char *spool = variable("NODEFABRIC_CNI_SPOOL", "/var/lib/nodefabric/spool");
        shorten_request(&request);
        return spool_request(spool, &request, &trouble) ? EXIT_SUCCESS : report(&trouble);
    }
    bound_output(command);
    return report(&(struct trouble){
        .code = command->code,
        .msg = "the nodefabric agent gives no answer; is its pod on this node running?",
        .thing = agent->sun_path,
        .why = exchange.why,
    });
}

/* The runtime's signals may be inherited in any state. A broken pipe and a file that grows too large are errors that
 * are told, not deaths; the alarm is a death, and so are the signals by which a runtime loses patience. */
static void settle_signals(void)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    static const int deadly[] = {SIGALRM, SIGHUP, SIGINT, SIGTERM};
    for (size_t i = 0; i < sizeof deadly / sizeof deadly[0]; i++)
        signal(deadly[i], SIG_DFL);
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
    settle_signals();
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
