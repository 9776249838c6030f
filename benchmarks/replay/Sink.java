package replay;

import java.io.FileWriter;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.io.Writer;
import java.util.UUID;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;

/**
 * Lines "row,now µs,epoch,task,attempt,columns…", and "end,now µs,epoch,task,attempt," when an attempt has given all of
 * its rows. A file of one write for each line.
 */
public class Sink extends ForeachWriter<Row> {
  private static final long serialVersionUID = 1;
  private final String path;
  private transient Writer out;
  private transient String attempt;

  public Sink(String path) {
    this.path = path;
  }

  @Override
  public boolean open(long partition, long epoch) {
    attempt = epoch + "," + partition + "," + UUID.randomUUID() + ",";
    try {
      out = new FileWriter(path, true);
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
    return true;
  }

  @Override
  public void process(Row row) {
    write("row", row.mkString(","));
  }

  @Override
  public void close(Throwable error) {
    if (out == null) {
      return;
    }
    if (error == null) {
      write("end", "");
    }
    try {
      out.close();
    } catch (IOException failed) {
      throw new UncheckedIOException(failed);
    }
  }

  private void write(String kind, String columns) {
    try {
      out.write(kind + "," + Source.nowUs() + "," + attempt + columns + "\n");
      out.flush();
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }
}
