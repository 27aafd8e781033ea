/* Posts new plants with head and body in two packets, as Python's http.client sends them.
 *
 * two_packets PORT TOKEN CONNECTIONS SECONDS FIRST_ID prints the counts and latencies as JSON, as
 * post.lua does. One thread serves all connections, which are kept alive. It knows as much of HTTP
 * as it needs: an answer has a Content-Length. It ends without waiting for the last answers. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct connection {
    int socket;
    int64_t sent_at;   /* microseconds */
    size_t received;   /* bytes of the answer that have come so far */
    char answer[8192];
};

static int port, poller;
static const char *token;
static long long next_id;
static long answers, refused, broken;
static uint32_t *latencies;   /* microseconds, one for each answer */

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000LL + time.tv_nsec / 1000;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void open_connection(struct connection *connection) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    int on = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connection->socket = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(connection->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(connection->socket, (struct sockaddr *)&address, sizeof address))
        fail("connect");
    if (epoll_ctl(poller, EPOLL_CTL_ADD, connection->socket, &event))
        fail("epoll_ctl");
}

/* Send the next plant. A send that fails shows as an end of the connection when it is read. */
static void post(struct connection *connection) {
    char head[512], body[128];
    int body_size = snprintf(body, sizeof body,
        "{\"id\": %lld, \"name\": \"Monstera\", \"tag\": \"indoor\"}", next_id++);
    int head_size = snprintf(head, sizeof head,
        "POST /plants HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer %s\r\n"
        "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n", port, token, body_size);
    connection->received = 0;
    connection->sent_at = now();
    send(connection->socket, head, head_size, MSG_NOSIGNAL);
    send(connection->socket, body, body_size, MSG_NOSIGNAL);
}

static int is_whole(const char *answer, size_t received) {
    const char *head_end = strstr(answer, "\r\n\r\n");
    const char *length = strcasestr(answer, "\r\ncontent-length:");
    if (!head_end)
        return 0;
    if (!length || length > head_end) {
        fprintf(stderr, "an answer without Content-Length\n");
        exit(1);
    }
    return received >= head_end + 4 - answer + strtoul(length + 17, NULL, 10);
}

static void count_answer(struct connection *connection) {
    if (answers % 65536 == 0) {
        latencies = realloc(latencies, (answers + 65536) * sizeof *latencies);
        if (!latencies)
            fail("realloc");
    }
    latencies[answers++] = now() - connection->sent_at;
    refused += memcmp(connection->answer, "HTTP/1.1 200", 12) != 0;
}

/* Take what has come, and post again if that makes the answer whole. */
static void receive(struct connection *connection) {
    size_t room = sizeof connection->answer - 1 - connection->received;
    ssize_t got = recv(connection->socket, connection->answer + connection->received, room, 0);
    if (got <= 0) {
        broken++;
        close(connection->socket);
        open_connection(connection);
        post(connection);
        return;
    }
    connection->received += got;
    connection->answer[connection->received] = 0;
    if (is_whole(connection->answer, connection->received)) {
        count_answer(connection);
        post(connection);
    }
}

static int ascending(const void *one, const void *other) {
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return (a > b) - (a < b);
}

/* The latency, in milliseconds, that this part of the answers stays within. */
static double percentile(double part) {
    return answers ? latencies[(long)(part * (answers - 1))] / 1e3 : 0;
}

int main(int count, char **arguments) {
    if (count != 6) {
        fprintf(stderr, "two_packets PORT TOKEN CONNECTIONS SECONDS FIRST_ID\n");
        return 2;
    }
    port = atoi(arguments[1]);
    token = arguments[2];
    int connections = atoi(arguments[3]);
    next_id = atoll(arguments[5]);
    poller = epoll_create1(0);
    struct connection *all = calloc(connections, sizeof *all);
    struct epoll_event events[64];
    for (int n = 0; n < connections; n++)
        open_connection(&all[n]);
    int64_t start = now(), end = start + atoll(arguments[4]) * 1000000;
    for (int n = 0; n < connections; n++)
        post(&all[n]);
    while (now() < end)
        for (int ready = epoll_wait(poller, events, 64, 100); ready > 0; ready--)
            receive(events[ready - 1].data.ptr);
    double seconds = (now() - start) / 1e6;
    qsort(latencies, answers, sizeof *latencies, ascending);
    printf("{\"answers\": %ld, \"refused\": %ld, \"broken\": %ld, \"seconds\": %f, \"p50\": %f, "
        "\"p99\": %f}\n", answers, refused, broken, seconds, percentile(0.50), percentile(0.99));
    return 0;
}
