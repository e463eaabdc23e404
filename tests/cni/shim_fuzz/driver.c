/* A fuzzer that is small, repeatable and needs no more than gcc: it mutates what it has, runs a target on it, and keeps
 * what reaches code that nothing reached before (-fsanitize-coverage=trace-pc tells).
 *
 *   fuzz TARGET --replay FILE...                              what the target says of each file, a line for each
 *   fuzz TARGET --for SECONDS --seed N --current FILE [--keep FOLDER] SEED-FILE...
 *
 * The input that is being tried lies in FILE: whoever started a fuzzer that stopped finds the culprit there. */
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "target.h"

enum { LONGEST = 4096, MOST_KEPT = 4096, MAP_SIZE = 1 << 16, HANG_SECONDS = 20 };

/* Targets may make more of an input that begins so: those take long, and are tried seldom. */
enum { HUGE_FROM = 0xf0 };

struct input {
    size_t length;
    uint8_t bytes[LONGEST];
};

struct current {
    uint32_t length;
    uint8_t bytes[LONGEST];
};

static uint8_t known[MAP_SIZE];
static bool is_new; /* since somebody last looked */
static struct input *kept[MOST_KEPT];
static size_t kept_count, edges;
static uint64_t state;
static struct current *current;

const struct target targets[] = {
    {"answer", try_answer}, {"holders", try_holders}, {"link", try_link},   {"netconf", try_netconf},
    {"report", try_report}, {"request", try_request}, {"spool", try_spool}, {"wait", try_wait},
};
const size_t target_count = sizeof targets / sizeof targets[0];

void __sanitizer_cov_trace_pc(void)
{
    uintptr_t at = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&targets;
    uint8_t *place = &known[(at ^ at >> 16) % MAP_SIZE];
    edges += *place == 0;
    is_new |= *place == 0;
    *place = 1;
}

void must(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "does not hold: %s\n", what);
    abort();
}

static uint64_t chance(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static void insert(struct input *input, size_t at, const void *bytes, size_t length)
{
    if (length > LONGEST - input->length)
        return;
    memmove(input->bytes + at + length, input->bytes + at, input->length - at);
    memcpy(input->bytes + at, bytes, length);
    input->length += length;
}

static void cut(struct input *input, size_t at, size_t length)
{
    if (length > input->length - at)
        length = input->length - at;
    memmove(input->bytes + at, input->bytes + at + length, input->length - at - length);
    input->length -= length;
}

static void mutate(struct input *input)
{
    static const char *const words[] = {"NFC1", "CNI_COMMAND=DEL", "\xf4\x8f\xbf\xbf", "\xed\xa0\x80", "3600", ".", "/", "\"",
                                        "\"type\":\"nodefabric\",", "\"cniVersion\":\"1.0.0\",", "\"prevResult\":{", "\"deviceID\":",
                                        "\"runtimeConfig\":{", "\\u00e4", "null", "[[", "}}", "\nend\n", "K8S_POD_NAME=", ";"};
    static const uint32_t numbers[] = {0, 1, 2, 0xff, 0x100, 1 << 20, (1 << 20) + 1, 4 << 20, (4 << 20) + 1, 0xffffffff};
    size_t at = chance(input->length + 1);
    uint8_t byte = (uint8_t)chance(256);
    switch (chance(9)) {
    case 0:
        if (at < input->length)
            input->bytes[at] ^= (uint8_t)(1u << chance(8));
        break;
    case 1:
        if (at < input->length)
            input->bytes[at] = byte;
        break;
    case 2:
        insert(input, at, &byte, 1);
        break;
    case 3:
        cut(input, at, 1 + chance(chance(4) == 0 ? LONGEST : 8));
        break;
    case 4: {
        const char *word = words[chance(sizeof words / sizeof words[0])];
        insert(input, at, word, strlen(word));
        break;
    }
    case 5: {
        uint32_t number = numbers[chance(sizeof numbers / sizeof numbers[0])];
        uint8_t big[4] = {(uint8_t)(number >> 24), (uint8_t)(number >> 16), (uint8_t)(number >> 8), (uint8_t)number};
        if (input->length >= at + 4)
            memcpy(input->bytes + at, big, 4);
        break;
    }
    case 6: { /* a length that is true */
        uint32_t body = input->length >= 8 ? (uint32_t)input->length - 8 : 0;
        uint8_t big[4] = {(uint8_t)(body >> 24), (uint8_t)(body >> 16), (uint8_t)(body >> 8), (uint8_t)body};
        if (input->length >= 8)
            memcpy(input->bytes + 4, big, 4);
        break;
    }
    case 7: {
        uint8_t part[256];
        size_t length = 1 + chance(sizeof part);
        if (length > input->length - at)
            length = input->length - at;
        memcpy(part, input->bytes + at, length);
        insert(input, chance(input->length + 1), part, length);
        break;
    }
    default: {
        const struct input *other = kept[chance(kept_count)];
        size_t from = chance(other->length + 1), length = chance(other->length - from + 1);
        insert(input, at, other->bytes + from, length);
    }
    }
}

static const char *run(const struct target *target, const struct input *input)
{
    current->length = (uint32_t)input->length;
    memcpy(current->bytes, input->bytes, input->length);
    alarm(HANG_SECONDS);
    uint8_t *exact = malloc(input->length == 0 ? 1 : input->length); /* so that one byte too far is seen */
    memcpy(exact, input->bytes, input->length);
    const char *word = target->try(exact, input->length);
    free(exact);
    return word;
}

static bool learn(void)
{
    bool learned = is_new;
    is_new = false;
    return learned;
}

static void keep(const struct input *input, const char *folder)
{
    if (kept_count == MOST_KEPT)
        return;
    kept[kept_count] = malloc(sizeof *input);
    *kept[kept_count++] = *input;
    if (folder == NULL)
        return;
    char path[4096];
    uint64_t sum = 0xcbf29ce484222325;
    for (size_t i = 0; i < input->length; i++)
        sum = (sum ^ input->bytes[i]) * 0x100000001b3;
    snprintf(path, sizeof path, "%s/%016llx", folder, (unsigned long long)sum);
    FILE *file = fopen(path, "wb");
    must(file != NULL && fwrite(input->bytes, 1, input->length, file) == input->length && fclose(file) == 0, path);
}

static void load(const char *path, struct input *input)
{
    FILE *file = fopen(path, "rb");
    must(file != NULL, path);
    input->length = fread(input->bytes, 1, LONGEST, file);
    fclose(file);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    const struct target *target = NULL;
    for (size_t i = 0; argc > 1 && i < target_count; i++)
        if (strcmp(argv[1], targets[i].name) == 0)
            target = &targets[i];
    must(target != NULL, "the first argument is a target");
    static struct input input;
    static struct current unshared;
    current = &unshared;
    double limit = 0;
    bool replay = false;
    const char *folder = NULL;
    state = 1;
    int at = 2;
    for (; at < argc && argv[at][0] == '-'; at++) {
        if (strcmp(argv[at], "--replay") == 0) {
            replay = true;
            continue;
        }
        must(at + 1 < argc, argv[at]);
        const char *value = argv[at + 1];
        if (strcmp(argv[at], "--for") == 0)
            limit = atof(value);
        else if (strcmp(argv[at], "--seed") == 0)
            state = strtoull(value, NULL, 10) * 2 + 1;
        else if (strcmp(argv[at], "--keep") == 0)
            folder = value;
        else if (strcmp(argv[at], "--current") == 0) {
            int file = open(value, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
            must(file >= 0 && ftruncate(file, sizeof *current) == 0, value);
            current = mmap(NULL, sizeof *current, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            must(current != MAP_FAILED, value);
            close(file);
        }
        at++;
    }
    size_t executions = 0;
    for (; at < argc; at++, executions++) {
        load(argv[at], &input);
        const char *word = run(target, &input);
        if (replay)
            printf("%s\n", word);
        if (learn() || kept_count == 0)
            keep(&input, NULL);
    }
    if (replay)
        return 0;
    must(kept_count > 0, "there are seed files");
    for (double end = seconds() + limit; executions % 64 != 0 || seconds() < end; executions++) {
        const struct input *from = kept[chance(kept_count)];
        input.length = from->length;
        memcpy(input.bytes, from->bytes, from->length);
        for (uint64_t times = 1 + chance(8); times > 0; times--)
            mutate(&input);
        if (input.length > 0 && input.bytes[0] >= HUGE_FROM && chance(32) != 0)
            input.bytes[0] &= 0x0f;
        run(target, &input);
        if (learn())
            keep(&input, folder);
    }
    printf("{\"target\": \"%s\", \"executions\": %zu, \"edges\": %zu, \"inputs\": %zu}\n", target->name, executions, edges,
           kept_count);
    return 0;
}
