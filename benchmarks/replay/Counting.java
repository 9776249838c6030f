package replay;

import org.apache.spark.api.java.function.MapFunction;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Encoders;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.RowFactory;
import org.apache.spark.sql.streaming.OutputMode;
import org.apache.spark.sql.streaming.StatefulProcessor;
import org.apache.spark.sql.streaming.TTLConfig;
import org.apache.spark.sql.streaming.TimeMode;
import org.apache.spark.sql.streaming.TimerValues;
import org.apache.spark.sql.streaming.ValueState;
import org.apache.spark.sql.types.StructType;
import scala.collection.Iterator;

/** What the operator Count does, by Spark's own state: transformWithState in the JVM. */
public final class Counting extends StatefulProcessor<String, Row, Row> {
  private static final long serialVersionUID = 1;
  private transient ValueState<Long> counted;

  @Override
  public void init(OutputMode outputMode, TimeMode timeMode) {
    counted = getHandle().getValueState("n", Encoders.LONG(), TTLConfig.NONE());
  }

  @Override
  public Iterator<Row> handleInputRows(String key, Iterator<Row> rows, TimerValues timers) {
    return rows.map(
        row -> {
          long n = (counted.exists() ? counted.get() : 0) + 1;
          counted.update(n);
          return RowFactory.create(row.get(0), row.get(1), row.get(2), row.get(3), n);
        });
  }

  /** Args: rows: part, off, k, due. */
  public static Dataset<Row> apply(Dataset<Row> rows) {
    StructType given = StructType.fromDDL("part int, off long, k string, due timestamp, n long");
    MapFunction<Row, String> key = row -> row.getString(2);
    return rows.select("part", "off", "k", "due")
        .groupByKey(key, Encoders.STRING())
        .transformWithState(new Counting(), TimeMode.None(), OutputMode.Update(), Encoders.row(given));
  }
}
