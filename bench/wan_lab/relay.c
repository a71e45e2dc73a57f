/*
 * A wide-area network between sites on one machine, where the kernel has none (netem): each site is a network namespace
 * with one TUN device, wan0, and this process carries the packets from one to the other.
 *
 *     site i  --> egress: rate, drop-tail queue --> delay of both links --> ingress: rate, drop-tail queue -->  site j
 *
 *   usage: relay [-q QUEUE_MS] [-m MTU] [-s SEED] SITE SITE...
 *   SITE:  NAMESPACE,ADDRESS,EGRESS_MBIT,INGRESS_MBIT,DELAY_MS,LOSS      (a rate of 0 has no cap; loss: 0 to 1)
 *
 * It reads commands from standard input and answers each with a line of JSON; the end of the input ends it, so that it
 * never outlives who started it.
 *
 *   stats                                   counters of each site since the start
 *   cut N, join N                           take away the link of the N-th site, from 0, and give it back
 *   link N EGRESS INGRESS DELAY LOSS        give it other properties; packets under way keep their times
 *
 * Queues are clocks: the time at which a link will have sent all that it was given. What is behind by more than QUEUE_MS
 * when a packet comes drops it. A packet of N bytes takes N x 8 / rate of its link and is delivered as a whole. A cut
 * link loses what comes to either end of it. Losses follow from the seed and the order of packets.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SITES = 32, LARGEST_PACKET = 65536, READS_A_TURN = 64 };
enum { IPV4_HEADER = 20, IPV4_DESTINATION = 16 };
static const uint64_t SECOND = 1000000000ull;  /* times are nanoseconds of the monotonic clock */

struct packet {
    struct packet *next;
    uint64_t due;              /* when it comes to where its queue leads */
    size_t length;
    unsigned char data[];
};

struct fifo {
    struct packet *first, *last;
};

struct counters {
    uint64_t sent_bytes, sent_packets;          /* that left the site, those lost on the way included */
    uint64_t received_bytes, received_packets;  /* that were delivered to it */
    uint64_t lost, cut, queue_drops;            /* packets: by chance, by a cut link, by a full queue; at the sender */
    uint64_t ingress_drops;                     /* by a full queue at the receiver */
};

struct site {
    const char *namespace;
    int device;
    in_addr_t address;
    double egress_ns_per_byte, ingress_ns_per_byte, delay_ns, loss;
    int is_cut;
    uint64_t egress_free, ingress_free;         /* until when each direction is taken */
    struct fifo ingress;
    struct counters count;
};

static struct site sites[MAX_SITES];
static struct fifo under_way[MAX_SITES][MAX_SITES];  /* from, to: one delay, so first in is first out */
static int number;
static uint64_t queue_ns, latest_ns;                 /* latest: the most by which a delivery came too late */
static uint64_t chance;
static volatile sig_atomic_t stopped;

static void stop(int signal_number) {
    (void)signal_number;
    stopped = 1;
}

static void fail(const char *what, const char *which) {
    fprintf(stderr, "relay: %s %s: %s\n", what, which, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* A number from 0 to 1, 1 excluded: xorshift64* (Vigna 2016). */
static double draw(void) {
    chance ^= chance >> 12;
    chance ^= chance << 25;
    chance ^= chance >> 27;
    return (double)((chance * 2685821657736338717ull) >> 11) / 9007199254740992.0;
}

static void put(struct fifo *queue, struct packet *p) {
    p->next = NULL;
    if (queue->first)
        queue->last->next = p;
    else
        queue->first = p;
    queue->last = p;
}

static struct packet *take(struct fifo *queue) {
    struct packet *p = queue->first;
    queue->first = p->next;
    return p;
}

/* When a packet that comes at `at` is through a direction of a link, or 0 where its queue is full. */
static uint64_t pass(uint64_t *free_at, double ns_per_byte, size_t length, uint64_t at) {
    uint64_t start = *free_at > at ? *free_at : at;
    if (start - at > queue_ns)
        return 0;
    *free_at = start + (uint64_t)(ns_per_byte * (double)length);
    return *free_at;
}

/* ---- Devices */

static void set_device(int control, unsigned long request, struct ifreq *asked, const char *what) {
    if (ioctl(control, request, asked) < 0)
        fail("cannot set", what);
}

/* wan0 in a namespace, up, with its address in a network of 256. Its file works from any namespace. */
static int open_device(const char *namespace, const char *address, int mtu) {
    char path[256];
    struct ifreq asked = {0};
    struct sockaddr_in *in = (struct sockaddr_in *)&asked.ifr_addr;
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int ours = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), theirs = open(path, O_RDONLY | O_CLOEXEC);
    if (ours < 0 || theirs < 0 || setns(theirs, CLONE_NEWNET) < 0)
        fail("cannot enter", path);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), control = socket(AF_INET, SOCK_DGRAM, 0);
    if (device < 0 || control < 0)
        fail("cannot open", "/dev/net/tun");
    strcpy(asked.ifr_name, "wan0");
    asked.ifr_flags = IFF_TUN | IFF_NO_PI;
    set_device(device, TUNSETIFF, &asked, "the device");
    in->sin_family = AF_INET;
    in->sin_port = 0;
    if (inet_pton(AF_INET, address, &in->sin_addr) != 1)
        fail("no address:", address);
    set_device(control, SIOCSIFADDR, &asked, "the address");
    inet_pton(AF_INET, "255.255.255.0", &in->sin_addr);
    set_device(control, SIOCSIFNETMASK, &asked, "the network");
    asked.ifr_mtu = mtu;
    set_device(control, SIOCSIFMTU, &asked, "the MTU");
    asked.ifr_qlen = 10000;  /* what waits for this process; the queues that count are its own */
    set_device(control, SIOCSIFTXQLEN, &asked, "the device's queue");
    asked.ifr_flags = IFF_UP | IFF_RUNNING;
    set_device(control, SIOCSIFFLAGS, &asked, "the device up");
    if (setns(ours, CLONE_NEWNET) < 0)
        fail("cannot return from", path);
    close(control);
    close(ours);
    close(theirs);
    return device;
}

static void set_link(struct site *site, double egress, double ingress, double delay_ms, double loss) {
    site->egress_ns_per_byte = egress > 0 ? 8e3 / egress : 0;
    site->ingress_ns_per_byte = ingress > 0 ? 8e3 / ingress : 0;
    site->delay_ns = delay_ms * 1e6;
    site->loss = loss;
}

/* ---- Packets on their way */

/* What a site has sent: onto its link, or dropped. Returns whether there was any. */
static int collect(int from) {
    static unsigned char data[LARGEST_PACKET];
    struct site *site = &sites[from];
    int reads = 0;
    for (; reads < READS_A_TURN; reads++) {
        ssize_t length = read(site->device, data, sizeof data);
        if (length <= 0)
            break;
        in_addr_t destination;
        if (length < IPV4_HEADER || data[0] >> 4 != 4)
            continue;
        memcpy(&destination, data + IPV4_DESTINATION, sizeof destination);
        int to = 0;
        while (to < number && sites[to].address != destination)
            to++;
        if (to == number)
            continue;
        site->count.sent_bytes += (uint64_t)length;
        site->count.sent_packets++;
        if (site->is_cut || sites[to].is_cut) {
            site->count.cut++;
            continue;
        }
        if (site->loss > 0 && draw() < site->loss) {
            site->count.lost++;
            continue;
        }
        uint64_t through = pass(&site->egress_free, site->egress_ns_per_byte, (size_t)length, now_ns());
        struct packet *p = through ? malloc(sizeof *p + (size_t)length) : NULL;
        if (!p) {
            site->count.queue_drops++;
            continue;
        }
        p->due = through + (uint64_t)(site->delay_ns + sites[to].delay_ns);
        p->length = (size_t)length;
        memcpy(p->data, data, (size_t)length);
        put(&under_way[from][to], p);
    }
    return reads > 0;
}

/* Packets that have come to the other side enter its queue in the order in which they came. */
static void arrive(int to, uint64_t now) {
    struct site *site = &sites[to];
    for (;;) {
        int first = -1;
        for (int from = 0; from < number; from++) {
            struct packet *p = under_way[from][to].first;
            if (p && p->due <= now && (first < 0 || p->due < under_way[first][to].first->due))
                first = from;
        }
        if (first < 0)
            return;
        struct packet *p = take(&under_way[first][to]);
        int cut = site->is_cut || sites[first].is_cut;
        uint64_t through = cut ? 0 : pass(&site->ingress_free, site->ingress_ns_per_byte, p->length, p->due);
        if (!through) {
            *(cut ? &site->count.cut : &site->count.ingress_drops) += 1;
            free(p);
            continue;
        }
        p->due = through;
        put(&site->ingress, p);
    }
}

/* Hands a site what is due. */
static void deliver(struct site *site, uint64_t now) {
    while (site->ingress.first && site->ingress.first->due <= now) {
        struct packet *p = take(&site->ingress);
        if (site->is_cut || write(site->device, p->data, p->length) < 0) {
            site->count.cut++;
        } else {
            site->count.received_bytes += p->length;
            site->count.received_packets++;
            if (now - p->due > latest_ns)
                latest_ns = now - p->due;
        }
        free(p);
    }
}

/* When something is due next; a second from now at the latest. */
static uint64_t next_due(uint64_t now) {
    uint64_t next = now + SECOND;
    for (int to = 0; to < number; to++) {
        if (sites[to].ingress.first && sites[to].ingress.first->due < next)
            next = sites[to].ingress.first->due;
        for (int from = 0; from < number; from++)
            if (under_way[from][to].first && under_way[from][to].first->due < next)
                next = under_way[from][to].first->due;
    }
    return next;
}

/* ---- Commands */

static void say_stats(void) {
    printf("{\"latest_ms\": %.3f, \"sites\": [", (double)latest_ns / 1e6);
    latest_ns = 0;
    for (int i = 0; i < number; i++) {
        const struct counters *c = &sites[i].count;
        printf("%s{\"name\": \"%s\", \"cut\": %s, \"sent_bytes\": %lu, \"sent_packets\": %lu, \"received_bytes\": %lu, "
               "\"received_packets\": %lu, \"lost\": %lu, \"cut_off\": %lu, \"queue_drops\": %lu, "
               "\"ingress_drops\": %lu}", i ? ", " : "", sites[i].namespace, sites[i].is_cut ? "true" : "false",
               c->sent_bytes, c->sent_packets, c->received_bytes, c->received_packets, c->lost, c->cut, c->queue_drops,
               c->ingress_drops);
    }
    printf("]}\n");
}

static void obey(const char *line) {
    double egress, ingress, delay, loss;
    int which = -1;
    if (strcmp(line, "stats") == 0) {
        say_stats();
    } else if ((sscanf(line, "cut %d", &which) == 1 || sscanf(line, "join %d", &which) == 1)
               && which >= 0 && which < number) {
        sites[which].is_cut = line[0] == 'c';
        printf("{}\n");
    } else if (sscanf(line, "link %d %lf %lf %lf %lf", &which, &egress, &ingress, &delay, &loss) == 5
               && which >= 0 && which < number) {
        set_link(&sites[which], egress, ingress, delay, loss);
        printf("{}\n");
    } else {
        printf("{\"error\": \"no such command or site\"}\n");
    }
    fflush(stdout);
}

/* Reads what there is of the input, and obeys each whole line of it. */
static void listen_to_input(void) {
    static char line[256];
    static size_t length;
    char data[256];
    ssize_t got = read(STDIN_FILENO, data, sizeof data);
    if (got <= 0) {
        stopped = got == 0 || errno != EINTR;
        return;
    }
    for (ssize_t i = 0; i < got; i++) {
        if (data[i] != '\n') {
            if (length < sizeof line - 1)
                line[length++] = data[i];
            continue;
        }
        line[length] = 0;
        length = 0;
        obey(line);
    }
}

/* ---- Start */

static void add_site(char *given, int mtu) {
    struct site *site = &sites[number];
    char *fields[6];
    int count = 0;
    for (char *word = strtok(given, ","); word && count < 6; word = strtok(NULL, ","))
        fields[count++] = word;
    if (count != 6 || number == MAX_SITES) {
        fprintf(stderr, "relay: a site is NAMESPACE,ADDRESS,EGRESS_MBIT,INGRESS_MBIT,DELAY_MS,LOSS; at most %d\n",
                MAX_SITES);
        exit(64);
    }
    site->namespace = fields[0];
    site->device = open_device(fields[0], fields[1], mtu);
    inet_pton(AF_INET, fields[1], &site->address);
    set_link(site, atof(fields[2]), atof(fields[3]), atof(fields[4]), atof(fields[5]));
    number++;
}

int main(int count, char **given) {
    double queue_ms = 100;
    int mtu = 1500, option;
    uint64_t seed = 1;
    while ((option = getopt(count, given, "q:m:s:")) != -1) {
        if (option == 'q')
            queue_ms = atof(optarg);
        else if (option == 'm')
            mtu = atoi(optarg);
        else if (option == 's')
            seed = strtoull(optarg, NULL, 10);
        else
            return 64;
    }
    queue_ns = (uint64_t)(queue_ms * 1e6);
    chance = seed * 0x9e3779b97f4a7c15ull + 1;      /* the generator's state must not be 0 */
    for (; optind < count; optind++)
        add_site(given[optind], mtu);
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGTERM, &action, NULL);
    signal(SIGINT, SIG_IGN);                        /* Ctrl-C reaches it too; who started it says when it ends */
    prctl(PR_SET_TIMERSLACK, 1000);                 /* 1 microsecond, not 50: what is due is delivered then */
    setpriority(PRIO_PROCESS, 0, -15);              /* sites that compute shall not slow their own network */
    printf("{\"sites\": %d}\n", number);
    fflush(stdout);

    struct pollfd ready[MAX_SITES + 1];
    for (int i = 0; i < number; i++)
        ready[i] = (struct pollfd){.fd = sites[i].device, .events = POLLIN};
    ready[number] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    while (!stopped) {
        uint64_t now = now_ns();
        for (int i = 0; i < number; i++) {
            arrive(i, now);
            deliver(&sites[i], now);
        }
        uint64_t next = next_due(now);
        now = now_ns();
        uint64_t wait = next > now ? next - now : 0;
        struct timespec timeout = {(time_t)(wait / SECOND), (long)(wait % SECOND)};
        if (ppoll(ready, (nfds_t)number + 1, &timeout, NULL) <= 0)
            continue;
        for (int i = 0; i < number; i++)
            if (ready[i].revents)
                collect(i);
        if (ready[number].revents)
            listen_to_input();
    }
    return 0;
}
