package replay;

import java.io.Serializable;
import java.time.Instant;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.IntStream;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeMode;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeRead;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * A source that gives the same rows whenever it is read, in micro-batches and in real time. Row i of partition p is due
 * at t0us + i * intervalUs. Options: partitions, intervalUs, t0us, keys, total (rows of each partition).
 */
public class Source implements TableProvider {
  static final StructType SCHEMA = new StructType()
      .add("part", DataTypes.IntegerType)
      .add("off", DataTypes.LongType)
      .add("k", DataTypes.StringType)
      .add("due", DataTypes.TimestampType);

  record Plan(int partitions, long intervalUs, long t0us, int keys, long total) implements Serializable {
    long dueUs(long row) {
      return t0us + row * intervalUs;
    }

    long available() {
      return Math.max(0, Math.min(total, Math.floorDiv(nowUs() - t0us, intervalUs) + 1));
    }
  }

  static long nowUs() {
    Instant now = Instant.now();
    return now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    return SCHEMA;
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    return new Rows();
  }

  static class Rows implements Table, SupportsRead {
    @Override
    public String name() {
      return "replay";
    }

    @Override
    @SuppressWarnings("deprecation")  // what is new in its place takes Spark's own classes
    public StructType schema() {
      return SCHEMA;
    }

    @Override
    public Set<TableCapability> capabilities() {
      return EnumSet.of(TableCapability.MICRO_BATCH_READ);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      Plan plan = new Plan(
          options.getInt("partitions", 1), options.getLong("intervalUs", 100_000), options.getLong("t0us", 0),
          options.getInt("keys", 16), options.getLong("total", Long.MAX_VALUE / 4));
      return () -> new Scan() {
        @Override
        public StructType readSchema() {
          return SCHEMA;
        }

        @Override
        public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
          return new Stream(plan);
        }
      };
    }
  }

  static class At extends Offset {
    final long[] next;

    At(long[] next) {
      this.next = next;
    }

    @Override
    public String json() {
      return Arrays.toString(next);
    }

    static At of(Offset offset) {
      return offset instanceof At at ? at : read(offset.json());
    }

    static At read(String json) {
      String[] numbers = json.replaceAll("[\\[\\] ]", "").split(",");
      return new At(Arrays.stream(numbers).mapToLong(Long::parseLong).toArray());
    }
  }

  record Part(int number, long from, long until) implements InputPartition {}

  record Reached(int number, long next) implements PartitionOffset {}

  static class Stream implements MicroBatchStream, SupportsRealTimeMode {
    final Plan plan;

    Stream(Plan plan) {
      this.plan = plan;
    }

    @Override
    public Offset initialOffset() {
      return new At(new long[plan.partitions()]);
    }

    @Override
    public Offset latestOffset() {
      long[] next = new long[plan.partitions()];
      Arrays.fill(next, plan.available());
      return new At(next);
    }

    @Override
    public Offset deserializeOffset(String json) {
      return At.read(json);
    }

    @Override
    public Offset mergeOffsets(PartitionOffset[] offsets) {
      long[] next = new long[plan.partitions()];
      for (PartitionOffset offset : offsets) {
        Reached reached = (Reached) offset;
        next[reached.number()] = reached.next();
      }
      return new At(next);
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start) {
      long[] from = At.of(start).next;
      return IntStream.range(0, from.length).mapToObj(p -> new Part(p, from[p], Long.MAX_VALUE))
          .toArray(InputPartition[]::new);
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
      long[] from = At.of(start).next;
      long[] until = At.of(end).next;
      return IntStream.range(0, from.length).mapToObj(p -> new Part(p, from[p], until[p]))
          .toArray(InputPartition[]::new);
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new Readers(plan);
    }

    @Override
    public void commit(Offset end) {}

    @Override
    public void stop() {}
  }

  record Readers(Plan plan) implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return new Reader(plan, (Part) partition);
    }
  }

  static class Reader implements SupportsRealTimeRead<InternalRow> {
    static final long LOOK_EVERY_NS = 50_000;
    final Plan plan;
    final Part part;
    long next;
    InternalRow row;

    Reader(Plan plan, Part part) {
      this.plan = plan;
      this.part = part;
      next = part.from();
    }

    private void take() {
      UTF8String key = UTF8String.fromString("k" + (next * 31 + part.number() * 7) % plan.keys());
      row = new GenericInternalRow(new Object[] {part.number(), next, key, plan.dueUs(next)});
      next++;
    }

    @Override
    public boolean next() {
      boolean more = next < part.until();
      if (more) {
        take();
      }
      return more;
    }

    @Override
    public InternalRow get() {
      return row;
    }

    @Override
    public PartitionOffset getOffset() {
      return new Reached(part.number(), next);
    }

    @Override
    public RecordStatus nextWithTimeout(Long startMs, Long timeoutMs) {
      long untilUs = (startMs + timeoutMs) * 1000;
      long dueUs = next < plan.total() ? plan.dueUs(next) : Long.MAX_VALUE;
      for (long now = nowUs(); now < dueUs; now = nowUs()) {
        if (now >= untilUs) {
          return RecordStatus.newStatusWithoutArrivalTime(false);
        }
        LockSupport.parkNanos(Math.min((Math.min(dueUs, untilUs) - now) * 1000, LOOK_EVERY_NS));
        if (Thread.interrupted()) {
          throw new IllegalStateException("interrupted");
        }
      }
      take();
      return RecordStatus.newStatusWithArrivalTimeMs(dueUs / 1000);
    }

    @Override
    public RecordStatus nextWithTimeout(Long timeoutMs) {
      return nextWithTimeout(System.currentTimeMillis(), timeoutMs);
    }

    @Override
    public void close() {}
  }
}
